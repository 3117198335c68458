//! Prompts that are alike but for one token, and whose answer tells which it was.

use std::collections::BTreeMap;

use serde_json::json;

use super::{Client, long_prompt};

/// A prompt and the only right answer, one token.
#[derive(Clone, Debug)]
pub(crate) struct Twin {
    pub(crate) prompt: String,
    pub(crate) own: &'static str,
}

/// One token each, and all of a kind: a model mixes them up before anything else.
pub(crate) const ANIMALS: [&str; 12] =
    ["dog", "cat", "horse", "lion", "tiger", "bear", "wolf", "fox", "mouse", "goat", "sheep", "duck"];

/// The model goes on with the word that followed the first time: nothing is so
/// easy, whatever the words between.
const RIDDLE: &str = " The secret animal is the";
/// A little less than three blocks.
const PROMPT_TOKENS: usize = 180;

/// For each of `places` and each of `animals` a prompt with the animal as its
/// token of that index, and all before and after it alike. Only those that an
/// undisturbed model answers with their own animal.
pub(crate) async fn twins(client: &Client, places: &[u64], animals: &[&'static str]) -> Vec<Twin> {
    let mut twins = Vec::new();
    for &place in places {
        let (head, tail) = around(client, place).await;
        for &own in animals {
            let twin = Twin { prompt: format!("{head} {own}{tail}"), own };
            let salt = format!("undisturbed {place} {own}");
            if client.complete(&twin.prompt, Some(&salt), "local").await == own {
                twins.push(twin);
            }
        }
    }
    let all = places.len() * animals.len();
    assert!(twins.len() * 4 >= all * 3, "only {} of {all} were understood", twins.len());
    twins
}

/// Asks for all of `twins` in turn, `count` times altogether, many at once and
/// by both routes. Returns what the wrong ones said.
pub(crate) async fn wrong_answers(client: &Client, twins: &[Twin], count: usize) -> BTreeMap<String, u32> {
    const ASKERS: usize = 6;
    let mut askers = tokio::task::JoinSet::new();
    for asker in 0..ASKERS {
        let (client, twins) = (client.clone(), twins.to_vec());
        askers.spawn(async move {
            let mut wrong = Vec::new();
            for round in (asker..count).step_by(ASKERS) {
                let Twin { prompt, own } = &twins[round % twins.len()];
                // Each of them by the other route the next time.
                let arm = ["local", "remote"][(round + round / twins.len()) % 2];
                let said = client.complete(prompt, None, arm).await;
                if said != *own {
                    wrong.push(format!("{said:?} instead of {own:?}"));
                }
            }
            wrong
        });
    }
    let mut wrong = BTreeMap::new();
    while let Some(of_one) = askers.join_next().await {
        for words in of_one.unwrap() {
            *wrong.entry(words).or_default() += 1;
        }
    }
    wrong
}

/// What comes before the token at index `place`, and what comes after it.
async fn around(client: &Client, place: u64) -> (String, String) {
    let place = usize::try_from(place).unwrap();
    let words = long_prompt(800 + place as u64, PROMPT_TOKENS);
    let words: Vec<_> = words.split(' ').collect();
    let begin = async |count: usize| {
        let head = format!("{}{RIDDLE}", words[..count].join(" "));
        (client.count_tokens(&head).await as usize, head)
    };
    // Each further word is one token.
    let (tokens, _) = begin(10).await;
    let count = 10 + place - tokens;
    let (tokens, head) = begin(count).await;
    assert_eq!(tokens, place, "{head}");
    (head, format!(". {}.{RIDDLE}", words[count..].join(" ")))
}
