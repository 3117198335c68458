//! Texts that no cache has seen: each starts with random words, and the same seed gives the same text.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

/// A short question.
pub(crate) fn short(seed: u64) -> String {
    let mut rng = StdRng::seed_from_u64(seed);
    format!("{}.\n\nWhich of these words do you like best? Answer in one short sentence.", salt(&mut rng))
}

/// About `words` random words, with a question about them at the end.
pub(crate) fn long(seed: u64, words: usize) -> String {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut text = format!("{}.\n\nRead these notes.\n", salt(&mut rng));
    let mut left = words;
    while left > 0 {
        let sentence = left.min(rng.random_range(7..15));
        text.push('\n');
        text.push_str(&random_words(&mut rng, sentence));
        text.push('.');
        left -= sentence;
    }
    text.push_str("\n\nQuestion: which word comes last in the notes? Answer with that word.");
    text
}

/// Asks for an answer that goes on as long as the server lets it.
pub(crate) fn peer(seed: u64) -> String {
    let mut rng = StdRng::seed_from_u64(seed);
    format!(
        "{}.\n\nCount from 1 to 5000. Write every number in words, one per line. Do not stop early and do \
         not leave any number out.",
        salt(&mut rng)
    )
}

/// Seven words of two hundred: one in 10^16 that two prompts start alike.
fn salt(rng: &mut StdRng) -> String {
    const SALT_WORDS: usize = 7;
    random_words(rng, SALT_WORDS)
}

fn random_words(rng: &mut StdRng, count: usize) -> String {
    let words: Vec<&str> = (0..count).filter_map(|_| WORDS.choose(rng).copied()).collect();
    words.join(" ")
}

const WORDS: [&str; 200] = [
    "able", "acid", "aged", "also", "area", "army", "away", "baby", "back", "ball", "band", "bank", "base",
    "bath", "bear", "beat", "been", "beer", "bell", "belt", "best", "bird", "blow", "blue", "boat", "body",
    "bond", "bone", "book", "boom", "born", "boss", "both", "bowl", "bulk", "burn", "bush", "busy", "cake",
    "call", "calm", "came", "camp", "card", "care", "case", "cash", "cast", "cell", "chat", "chip", "city",
    "club", "coal", "coat", "code", "cold", "come", "cook", "cool", "cope", "copy", "core", "cost", "crew",
    "crop", "dark", "data", "date", "dawn", "days", "dead", "deal", "dean", "dear", "debt", "deep", "deny",
    "desk", "dial", "diet", "disk", "does", "done", "door", "dose", "down", "draw", "drew", "drop", "drug",
    "dual", "duke", "dust", "duty", "each", "earn", "ease", "east", "easy", "edge", "else", "even", "ever",
    "exit", "face", "fact", "fail", "fair", "fall", "farm", "fast", "fate", "fear", "feed", "feel", "feet",
    "fell", "felt", "file", "fill", "film", "find", "fine", "fire", "firm", "fish", "five", "flat", "flow",
    "food", "foot", "ford", "form", "fort", "four", "free", "from", "fuel", "full", "fund", "gain", "game",
    "gate", "gave", "gear", "gene", "gift", "girl", "give", "glad", "goal", "goes", "gold", "golf", "gone",
    "good", "gray", "grew", "grey", "grow", "gulf", "hair", "half", "hall", "hand", "hang", "hard", "harm",
    "hate", "have", "head", "hear", "heat", "held", "help", "here", "hero", "high", "hill", "hire", "hold",
    "hole", "holy", "home", "hope", "host", "hour", "huge", "hung", "hunt", "hurt", "idea", "inch", "into",
    "iron", "item", "jack", "join", "jump",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_text_and_another_seed_another_start() {
        assert_eq!(long(1, 50), long(1, 50));
        for other in 2..50 {
            assert_ne!(long(1, 50)[..20], long(other, 50)[..20]);
            assert_ne!(short(1)[..20], short(other)[..20]);
            assert_ne!(peer(1)[..20], peer(other)[..20]);
        }
    }

    #[test]
    fn a_long_prompt_grows_word_by_word() {
        let count = |text: String| text.split_whitespace().count();
        let fixed = count(long(3, 0));
        assert_eq!(count(long(3, 1)), fixed + 1);
        assert_eq!(count(long(3, 1000)), fixed + 1000);
    }

    #[test]
    fn the_question_stands_at_the_end() {
        assert!(long(4, 100).ends_with("Answer with that word."));
    }
}
