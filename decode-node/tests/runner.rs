//! The decode loop over the fake engine, in one thread.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use decode_node::runner::{Runner, RunnerSettings};
use decode_node::{NewSequence, Prefix, RequestKey, SequenceEvent};
use engine::fake::{Failure, FakeModel, FakeOptions};
use engine::{BatchItem, InstallBlob, Model, SessionConfig};
use kv_block::{IsolationKey, SlotId, Token};
use kv_transfer::{FailureKind, FinishReason, Sampling};
use tokio::sync::{mpsc, oneshot};

const GREEDY: Sampling = Sampling { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: 0 };

fn config(slots: usize) -> SessionConfig {
    SessionConfig { slots, context_tokens: 2048, batch_tokens_max: 512, threads: 1 }
}

/// Answers that only their length ends.
fn endless() -> FakeOptions {
    FakeOptions { end_one_in: 0, ..FakeOptions::default() }
}

struct Lab {
    model: FakeModel,
    runner: Runner,
    next_key: u64,
}

struct Client {
    key: RequestKey,
    events: mpsc::UnboundedReceiver<SequenceEvent>,
}

#[expect(clippy::disallowed_methods, reason = "the runner measures its steps")]
fn clock() -> Instant {
    Instant::now()
}

impl Lab {
    fn new(slots: usize, options: FakeOptions) -> Self {
        let model = FakeModel::new(options).unwrap();
        let session = model.decode_session(&config(slots)).unwrap();
        let settings = RunnerSettings { itl_cap_ms: 100.0, long_tokens: 300, max_long: 1, block_tokens: 16 };
        let runner = Runner::new(session, model.vocabulary(), model.fingerprint(), settings, clock);
        Self { model, runner, next_key: 0 }
    }

    fn ask(&mut self, prompt: &[Token], max_tokens: usize) -> Client {
        self.ask_with(prompt, max_tokens, None)
    }

    fn ask_with(&mut self, prompt: &[Token], max_tokens: usize, prefix: Option<Prefix>) -> Client {
        let (sender, events) = mpsc::unbounded_channel();
        let key = RequestKey(self.next_key);
        self.next_key += 1;
        self.runner.enqueue(NewSequence {
            key,
            tokens: prompt.into(),
            isolation: IsolationKey::SHARED,
            sampling: GREEDY,
            max_tokens,
            ignore_end: true,
            prefix,
            events: sender,
        });
        Client { key, events }
    }

    fn run(&mut self) {
        for _ in 0..10_000 {
            if !self.runner.turn() && !self.runner.has_work() {
                return;
            }
        }
        panic!("still at work after 10,000 steps");
    }

    /// What the model says after `prompt` when asked on its own.
    fn oracle(&self, prompt: &[Token], count: usize) -> Vec<Token> {
        self.model.continuation(prompt, count)
    }

    /// The KV of `prompt` as a prefill node would send it.
    fn blob(&self, prompt: &[Token]) -> InstallBlob {
        let mut prefill = self.model.prefill_session(&config(1)).unwrap();
        prefill.step(&[BatchItem { slot: SlotId(0), tokens: prompt, logits: false }]).unwrap();
        let rows = prefill.export(SlotId(0), 0..prompt.len()).unwrap();
        let template = self.model.decode_session(&config(1)).unwrap().blob_template().unwrap();
        let mut blob = template.blob(prompt.len());
        for &(part, _) in template.layout().parts() {
            let from = rows.rows(part, 0..prompt.len());
            blob.rows_mut(part, 0..prompt.len()).unwrap().copy_from_slice(&from);
        }
        blob
    }
}

impl Client {
    fn all(&mut self) -> (Option<SequenceEvent>, Vec<Token>, Option<SequenceEvent>) {
        let (mut first, mut tokens, mut last) = (None, Vec::new(), None);
        while let Ok(event) = self.events.try_recv() {
            match event {
                SequenceEvent::Started { .. } => first = Some(event),
                SequenceEvent::Token(token) => tokens.push(token),
                _ => last = Some(event),
            }
        }
        (first, tokens, last)
    }
}

fn prompt(seed: u32, length: u32) -> Vec<Token> {
    (0..length).map(|i| Token((seed * 31 + i * 7 + i * i) % 200)).collect()
}

#[test]
fn concurrent_sequences_each_get_their_own_text() {
    let mut lab = Lab::new(4, endless());
    let prompts: Vec<_> = (0..10).map(|seed| prompt(seed, 20 + seed * 13)).collect();
    let mut clients: Vec<_> = prompts.iter().map(|prompt| lab.ask(prompt, 12)).collect();
    lab.run();
    for (prompt, client) in prompts.iter().zip(&mut clients) {
        let (first, tokens, last) = client.all();
        assert_eq!(first, Some(SequenceEvent::Started { cached: 0, installed: 0 }));
        assert_eq!(tokens, lab.oracle(prompt, 12));
        assert_eq!(last, Some(SequenceEvent::Finished(FinishReason::Length)));
    }
    assert_eq!(lab.runner.state().slots_used, 0);
}

#[test]
fn an_installed_prefix_continues_like_a_local_prompt() {
    let mut lab = Lab::new(2, endless());
    let prompt = prompt(3, 500);
    let blob = lab.blob(&prompt[..499]);
    let (installed, mut answer) = oneshot::channel();
    let mut client = lab.ask_with(&prompt, 10, Some(Prefix { blob, installed, room: None }));
    lab.run();
    assert!(answer.try_recv().unwrap());
    let (first, tokens, _) = client.all();
    assert_eq!(first, Some(SequenceEvent::Started { cached: 0, installed: 499 }));
    assert_eq!(tokens, lab.oracle(&prompt, 10));
    let state = lab.runner.state();
    assert_eq!((state.prefill_tokens, state.installed_tokens), (1, 499), "only the last token is computed");
}

#[test]
fn a_running_stream_gets_a_token_between_an_install_and_its_first_step() {
    let mut lab = Lab::new(4, endless());
    let mut stream = lab.ask(&prompt(1, 30), 100);
    lab.runner.turn();
    let prompts = [prompt(2, 200), prompt(3, 200)];
    let mut arrivals: Vec<_> = prompts
        .iter()
        .map(|prompt| {
            let (installed, answer) = oneshot::channel();
            let prefix = Prefix { blob: lab.blob(&prompt[..199]), installed, room: None };
            (lab.ask_with(prompt, 5, Some(prefix)), answer)
        })
        .collect();
    let mut installs = Vec::new();
    for _ in 0..3 {
        stream.all();
        lab.runner.turn();
        assert_eq!(stream.all().1.len(), 1, "the stream moves in every turn");
        installs.push(arrivals.iter_mut().filter_map(|(_, answer)| answer.try_recv().ok()).count());
        if installs.len() == 1 {
            assert!(arrivals[0].0.all().1.is_empty(), "not in the turn of its install");
        }
    }
    assert_eq!(installs, [1, 1, 0], "one install per turn");
    lab.run();
    for ((client, _), prompt) in arrivals.iter_mut().zip(&prompts) {
        assert_eq!(client.all().1.last(), lab.oracle(prompt, 5).last());
    }
}

#[test]
fn a_refused_install_is_computed_here_instead() {
    let mut lab = Lab::new(2, endless());
    let prompt = prompt(3, 400);
    let blob = lab.blob(&prompt[..399]);
    lab.model.fail_next(Failure::Install, 1);
    let (installed, mut answer) = oneshot::channel();
    let mut client = lab.ask_with(&prompt, 10, Some(Prefix { blob, installed, room: None }));
    lab.run();
    assert!(!answer.try_recv().unwrap());
    assert_eq!(client.all().1, lab.oracle(&prompt, 10));
}

#[test]
fn the_next_turn_of_a_chat_computes_only_what_is_new() {
    let mut lab = Lab::new(2, endless());
    let mut chat = prompt(5, 100);
    let mut client = lab.ask(&chat, 8);
    lab.run();
    chat.extend(client.all().1);
    chat.extend(prompt(6, 30));
    let mut client = lab.ask(&chat, 8);
    lab.run();
    let (first, tokens, _) = client.all();
    // The last generated token was never fed back, so its KV is not there.
    assert_eq!(first, Some(SequenceEvent::Started { cached: 107, installed: 0 }));
    assert_eq!(tokens, lab.oracle(&chat, 8));
}

#[test]
fn one_long_prompt_at_a_time_and_shorts_pass_it() {
    let options = FakeOptions { token_time: Duration::from_micros(200), ..endless() };
    let mut lab = Lab::new(4, options);
    let mut longs = [lab.ask(&prompt(1, 1500), 2), lab.ask(&prompt(2, 1500), 2)];
    for _ in 0..2 {
        lab.runner.turn();
    }
    assert_eq!(lab.runner.state().slots_used, 1, "the second long one waits without a slot");
    let mut short = lab.ask(&prompt(3, 40), 1);
    lab.runner.turn();
    assert!(short.all().2.is_some(), "a short one is answered within the next step");
    assert!(longs[0].all().0.is_none());
    lab.run();
    for (long, seed) in longs.iter_mut().zip([1, 2]) {
        assert_eq!(long.all().1, lab.oracle(&prompt(seed, 1500), 2));
    }
}

#[test]
fn cancelled_requests_free_their_slot_and_leave_the_others_alone() {
    let mut lab = Lab::new(2, endless());
    let (mut kept, gone, waiting) =
        (lab.ask(&prompt(1, 60), 50), lab.ask(&prompt(2, 60), 50), lab.ask(&prompt(3, 60), 50));
    lab.runner.turn();
    lab.runner.cancel(gone.key);
    lab.runner.cancel(waiting.key);
    assert_eq!(lab.runner.state().slots_used, 1);
    lab.run();
    assert_eq!(kept.all().1, lab.oracle(&prompt(1, 60), 50));
}

#[test]
fn a_client_that_left_without_a_word_is_noticed() {
    let mut lab = Lab::new(1, endless());
    let client = lab.ask(&prompt(1, 60), 1000);
    lab.runner.turn();
    drop(client);
    lab.runner.turn();
    lab.runner.turn();
    assert!(!lab.runner.has_work());
}

#[test]
fn a_failed_step_ends_its_sequences_with_an_error_and_serving_goes_on() {
    let mut lab = Lab::new(2, endless());
    let mut broken = lab.ask(&prompt(1, 60), 5);
    lab.model.fail_next(Failure::Step, 1);
    lab.run();
    let (_, tokens, last) = broken.all();
    assert!(tokens.is_empty());
    assert!(matches!(last, Some(SequenceEvent::Failed { kind: FailureKind::Internal, .. })), "{last:?}");
    let mut next = lab.ask(&prompt(1, 60), 5);
    lab.run();
    assert_eq!(next.all().1, lab.oracle(&prompt(1, 60), 5));
}

#[test]
fn the_context_ends_a_sequence_with_length() {
    let mut lab = Lab::new(1, endless());
    let mut client = lab.ask(&prompt(1, 2040), 1000);
    lab.run();
    let (_, tokens, last) = client.all();
    assert_eq!(tokens.len(), 9, "2,048 resident, and one more that was sampled from them");
    assert_eq!(last, Some(SequenceEvent::Finished(FinishReason::Length)));
}

#[test]
fn an_end_token_stops_and_is_not_sent() {
    let mut lab = Lab::new(1, FakeOptions { end_one_in: 4, ..endless() });
    let (sender, events) = mpsc::unbounded_channel();
    let prompt = prompt(1, 30);
    lab.runner.enqueue(NewSequence {
        key: RequestKey(9),
        tokens: Arc::from(prompt.as_slice()),
        isolation: IsolationKey::SHARED,
        sampling: GREEDY,
        max_tokens: 200,
        ignore_end: false,
        prefix: None,
        events: sender,
    });
    lab.run();
    let (_, tokens, last) = Client { key: RequestKey(9), events }.all();
    assert!(tokens.len() < 200);
    assert_eq!(tokens, lab.oracle(&prompt, 200));
    assert_eq!(last, Some(SequenceEvent::Finished(FinishReason::Stop)));
}
