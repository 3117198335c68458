//! The requests of a run: who asks what, when, and how the client behaves.

use std::time::Duration;

use engine::fake::FakeModel;
use rand::Rng;
use rand::rngs::SmallRng;
use serde_json::{Value, json};

use crate::oracle::{self, Expected};

/// What one client does.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Place in the run; names the request in messages.
    pub(crate) number: usize,
    /// After the request before.
    pub(crate) pause: Duration,
    /// Where it goes.
    pub(crate) path: &'static str,
    /// Its body.
    pub(crate) body: String,
    /// Chosen arm, if any.
    pub(crate) arm: Option<&'static str>,
    /// Whether the answer comes as events.
    pub(crate) stream: bool,
    /// The answer, or `None` for a request that must be refused.
    pub(crate) expected: Option<Expected>,
    /// Status of the refusal, where there is nothing to expect.
    pub(crate) refusal: u16,
    /// How the client reads it.
    pub(crate) manner: Manner,
    /// How often the client asks again after an error.
    pub(crate) retries: usize,
}

/// How a client reads its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manner {
    /// To the end.
    Patient,
    /// Closes the connection after this time.
    Leaves(Duration),
    /// Reads nothing for a while after the first bytes.
    Stalls(Duration),
}

/// Shares of a run's requests, each 0 to 1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Clients that leave early.
    pub(crate) leave: f64,
    /// Clients that stop reading for a while.
    pub(crate) stall: f64,
    /// Requests that cannot be served.
    pub(crate) invalid: f64,
    /// Clients that ask again after an error.
    pub(crate) retry: f64,
    /// Mean pause between two requests.
    pub(crate) pause: Duration,
}

/// Texts from which prompts begin, so that prefixes are shared.
const OPENINGS: usize = 6;
/// Chats that go on.
const CHATS: usize = 8;
const RETRIES: usize = 2;
const LONGEST_PROMPT: usize = 1_500;

/// Makes plans, one after the other.
pub(crate) struct Workload<'a> {
    model: &'a FakeModel,
    shape: Shape,
    openings: Vec<String>,
    /// Chats that a client may go on with, each as it stands with the right answer.
    chats: Vec<Vec<(&'static str, String)>>,
    number: usize,
}

impl<'a> Workload<'a> {
    /// A workload whose openings are drawn from `rng`.
    pub(crate) fn new(model: &'a FakeModel, shape: Shape, rng: &mut SmallRng) -> Self {
        let openings = (0..OPENINGS)
            .map(|_| {
                let length = rng.random_range(20..900);
                words(rng, length)
            })
            .collect();
        Self { model, shape, openings, chats: Vec::new(), number: 0 }
    }

    /// The next request.
    pub(crate) fn next(&mut self, rng: &mut SmallRng) -> Plan {
        let shape = self.shape;
        let plan = match rng.random_bool(shape.invalid) {
            true => self.invalid(rng),
            false => self.valid(rng),
        };
        self.number += 1;
        let manner = match rng.random::<f64>() {
            luck if luck < shape.leave => Manner::Leaves(Duration::from_millis(rng.random_range(0..1_500))),
            luck if luck < shape.leave + shape.stall => {
                Manner::Stalls(Duration::from_millis(rng.random_range(100..5_000)))
            }
            _ => Manner::Patient,
        };
        // Exponential, as independent clients come.
        let pause = shape.pause.mul_f64(-(1.0 - rng.random::<f64>()).ln());
        let retries = if rng.random_bool(shape.retry) { RETRIES } else { 0 };
        Plan { manner, pause, retries, ..plan }
    }

    fn valid(&mut self, rng: &mut SmallRng) -> Plan {
        let opening = match rng.random_bool(0.5) {
            true => self.openings[rng.random_range(0..OPENINGS)].as_str(),
            false => "",
        };
        let own = match rng.random_bool(0.4) {
            true => rng.random_range(400..LONGEST_PROMPT - 900),
            false => rng.random_range(5..120),
        };
        let prompt = format!("{opening}{}", words(rng, own));
        let max_tokens = rng.random_range(1..40);
        let stream = rng.random_bool(0.7);
        let mut body = json!({ "max_tokens": max_tokens, "temperature": 0, "stream": stream });
        if rng.random_bool(0.2) {
            body["cache_salt"] = format!("tenant-{}", rng.random_range(0..3)).into();
        }
        if stream {
            body["stream_options"] = json!({ "include_usage": true });
        }
        let (path, expected) = if rng.random_bool(0.7) {
            let messages = self.turn(rng, prompt);
            let listed = messages.iter().map(|(role, text)| json!({ "role": role, "content": text }));
            body["messages"] = listed.collect();
            let expected = oracle::chat(self.model, &messages, max_tokens);
            self.remember(rng, messages, &expected);
            ("/v1/chat/completions", expected)
        } else {
            let expected = oracle::completion(self.model, &prompt, max_tokens);
            body["prompt"] = prompt.into();
            ("/v1/completions", expected)
        };
        let arm = match rng.random_range(0..10) {
            0 => Some("local"),
            1 => Some("remote"),
            _ => None,
        };
        Plan { arm, ..self.plan(path, body, stream, Some(expected)) }
    }

    /// The next turn of an earlier chat, or the first of a new one.
    fn turn(&self, rng: &mut SmallRng, prompt: String) -> Vec<(&'static str, String)> {
        if self.chats.is_empty() || rng.random_bool(0.6) {
            return vec![("user", prompt)];
        }
        let mut messages = self.chats[rng.random_range(0..self.chats.len())].clone();
        let length = rng.random_range(3..60);
        messages.push(("user", words(rng, length)));
        messages
    }

    fn remember(&mut self, rng: &mut SmallRng, mut chat: Vec<(&'static str, String)>, expected: &Expected) {
        chat.push(("assistant", expected.text.clone()));
        if chat.iter().map(|(_, text)| text.len()).sum::<usize>() > LONGEST_PROMPT {
            return;
        }
        if self.chats.len() < CHATS {
            self.chats.push(chat);
        } else {
            self.chats[rng.random_range(0..CHATS)] = chat;
        }
    }

    fn invalid(&self, rng: &mut SmallRng) -> Plan {
        let (body, refusal) = match rng.random_range(0..5) {
            0 => (json!({ "messages": [] }), 400),
            1 => (json!({ "prompt": "a", "max_tokens": -3 }), 400),
            2 => (json!({ "prompt": words(rng, 30), "temperature": "hot" }), 400),
            3 => (json!({ "prompt": words(rng, 3_000) }), 400),
            _ => (json!({ "prompt": "a", "model": "another" }), 404),
        };
        let path = if body.get("messages").is_some() { "/v1/chat/completions" } else { "/v1/completions" };
        Plan { refusal, ..self.plan(path, body, false, None) }
    }

    fn plan(&self, path: &'static str, body: Value, stream: bool, expected: Option<Expected>) -> Plan {
        Plan {
            number: self.number,
            pause: Duration::ZERO,
            path,
            body: body.to_string(),
            arm: None,
            stream,
            expected,
            refusal: 400,
            manner: Manner::Patient,
            retries: 0,
        }
    }

    /// Two requests for the end of a run: one short, one long and cold.
    pub(crate) fn probes(&mut self, rng: &mut SmallRng) -> [Plan; 2] {
        [40, LONGEST_PROMPT].map(|length| {
            let prompt = words(rng, length);
            let expected = oracle::completion(self.model, &prompt, 10);
            let body = json!({ "prompt": prompt, "max_tokens": 10, "temperature": 0 });
            self.number += 1;
            Plan { number: self.number - 1, ..self.plan("/v1/completions", body, false, Some(expected)) }
        })
    }
}

/// Small letters and blanks: one token each.
fn words(rng: &mut SmallRng, length: usize) -> String {
    let letter = |draw: u8| if draw == 26 { ' ' } else { char::from(b'a' + draw) };
    (0..length).map(|_| letter(rng.random_range(0..27))).collect()
}
