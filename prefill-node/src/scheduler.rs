//! Which prompt computes its next chunk.
//!
//! ```text
//!  admit ─▶ waiting ──plan──▶ resident ⇄ chunk, chunk, … ──▶ done
//!              │  at most `max_resident`   │
//!              └────────── remove ─────────┘
//! ```
//!
//! Order: shortest remaining prefill first, with ageing. A prompt's key is
//! `arrived + remaining / ageing`, where `ageing` is [`AGEING`] times the
//! learned rate; the smallest key goes next. From that follows the bound: a
//! prompt is overtaken only by prompts that arrive within twice (1 / AGEING)
//! the time that its own remaining tokens take to compute; whoever comes
//! later, however short, goes after it.
//!
//! Invariants: at most `max_resident` prompts are partly computed; a removed
//! prompt is never planned again. A slow receiver costs memory before it costs
//! others their turn: prompts are computed to their end, which frees their
//! session, while what is not yet on the network fits `unsent_tokens_max`;
//! beyond that a prompt with [`UNSENT_CHUNKS_FREE`] such chunks waits.
//!
//! Pure: time comes in as an argument. Not its job: engines, networks.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_block::{IsolationKey, Token};

use crate::residents::Residents;

/// Share of the compute rate at which waiting makes up for length.
pub(crate) const AGEING: f64 = 0.5;

/// Exported chunks of one prompt that may wait for the network in any case.
/// Enough for the encoder and the stream to stay busy, few enough to be cheap.
pub(crate) const UNSENT_CHUNKS_FREE: usize = 4;

/// Assumed until the first chunk is measured: a small model on one core.
const SECONDS_PER_TOKEN_AT_FIRST: f64 = 0.002;

/// Weight of a new measurement in the learned rate: about the last ten chunks count.
const RATE_WEIGHT: f64 = 0.2;

/// A prompt in this node; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PromptId(pub(crate) u64);

/// Sizes that do not change.
#[derive(Clone, Debug)]
pub(crate) struct SchedulerConfig {
    pub(crate) block_tokens: usize,
    /// A multiple of `block_tokens`.
    pub(crate) chunk_tokens: usize,
    pub(crate) max_resident: usize,
    pub(crate) queue_tokens_max: usize,
    pub(crate) prompts_max: usize,
}

/// What is to be computed.
#[derive(Clone, Debug)]
pub(crate) struct Prompt {
    /// KV is wanted for all of these.
    pub(crate) tokens: Arc<[Token]>,
    /// KV before this token is not exported; a block boundary.
    pub(crate) export_from: usize,
    /// Who may reuse what it leaves behind.
    pub(crate) isolation: IsolationKey,
}

/// Answer to a new prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Admission {
    /// It waits for its turn.
    Queued { id: PromptId, tokens_ahead: usize, expected_start: Duration },
    /// No room for that many tokens.
    TokensFull { queued: usize, limit: usize },
    /// No room for another prompt.
    PromptsFull { limit: usize },
}

/// The next piece of work for the engine.
#[derive(Clone, Debug)]
pub(crate) struct Chunk {
    pub(crate) id: PromptId,
    /// Session to use. It holds `held` tokens of this prompt; what it holds
    /// beyond them belongs to an earlier one and goes first.
    pub(crate) resident: usize,
    pub(crate) held: usize,
    pub(crate) tokens: Arc<[Token]>,
    /// Tokens of this chunk. Ends at a block boundary or with the prompt.
    pub(crate) range: Range<usize>,
    /// Whether the session lacks them. Otherwise they are only exported.
    pub(crate) compute: bool,
    /// Tokens whose KV is exported: `range` without what the receiver has.
    pub(crate) export: Range<usize>,
    /// Tokens that this prompt found in the session when it began.
    pub(crate) reused: usize,
    /// First chunk of the prompt.
    pub(crate) first: bool,
    /// Last chunk of the prompt.
    pub(crate) last: bool,
}

/// Figures for the node's status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct QueueFigures {
    /// Tokens still to compute.
    pub(crate) queue_tokens: usize,
    /// Prompts partly computed.
    pub(crate) residents_used: usize,
    /// Tokens whose KV is in some session.
    pub(crate) held_tokens: usize,
}

/// The queue and the order.
#[derive(Debug)]
pub(crate) struct Scheduler {
    config: SchedulerConfig,
    prompts: BTreeMap<PromptId, Entry>,
    residents: Residents,
    /// Tokens of each chunk handed to the engine whose bytes are not yet on the
    /// network, oldest first; also of prompts that are computed.
    unsent: BTreeMap<PromptId, VecDeque<usize>>,
    /// Most of these tokens at once, unless every prompt has few.
    unsent_tokens_max: usize,
    next_id: u64,
    seconds_per_token: Option<f64>,
}

#[derive(Debug)]
struct Entry {
    prompt: Prompt,
    arrived: Instant,
    begun: Option<Begun>,
}

#[derive(Debug)]
struct Begun {
    resident: usize,
    reused: usize,
    /// Tokens computed, or reused and exported, or reused and not wanted.
    done: usize,
}

impl Scheduler {
    pub(crate) fn new(config: SchedulerConfig) -> Self {
        let residents = Residents::new(config.max_resident, config.block_tokens);
        Self {
            config,
            prompts: BTreeMap::new(),
            residents,
            unsent: BTreeMap::new(),
            unsent_tokens_max: 0,
            next_id: 0,
            seconds_per_token: None,
        }
    }

    /// From now on so many exported tokens may wait for the network.
    pub(crate) fn allow_unsent(&mut self, tokens: usize) {
        self.unsent_tokens_max = tokens;
    }

    /// Takes a prompt into the queue, or says why not. `prompt.tokens` is not empty.
    pub(crate) fn admit(&mut self, now: Instant, prompt: Prompt) -> Admission {
        if self.prompts.len() >= self.config.prompts_max {
            return Admission::PromptsFull { limit: self.config.prompts_max };
        }
        let queued = self.queue_tokens();
        let limit = self.config.queue_tokens_max;
        if queued > 0 && queued + prompt.tokens.len() > limit {
            return Admission::TokensFull { queued, limit };
        }
        let entry = Entry { prompt, arrived: now, begun: None };
        let tokens_ahead = self.tokens_ahead_of(&entry, now);
        let expected_start = Duration::from_secs_f64(tokens_ahead as f64 * self.seconds_per_token());
        let id = PromptId(self.next_id);
        self.next_id += 1;
        self.prompts.insert(id, entry);
        Admission::Queued { id, tokens_ahead, expected_start }
    }

    /// Drops a prompt and what it has not sent. What it computed stays in its
    /// session for others.
    pub(crate) fn remove(&mut self, id: PromptId) {
        self.unsent.remove(&id);
        self.take_out(id);
    }

    fn take_out(&mut self, id: PromptId) {
        if let Some(entry) = self.prompts.remove(&id)
            && let Some(begun) = entry.begun
        {
            self.residents.release(begun.resident);
        }
    }

    /// All bytes of one chunk of this prompt are on the network.
    pub(crate) fn chunk_sent(&mut self, id: PromptId) {
        if let Some(chunks) = self.unsent.get_mut(&id) {
            chunks.pop_front();
            if chunks.is_empty() {
                self.unsent.remove(&id);
            }
        }
    }

    /// The next chunk, or `None` while nothing can run. The engine computes one
    /// chunk at a time: report [`Scheduler::chunk_done`] or
    /// [`Scheduler::chunk_failed`] before the next call.
    pub(crate) fn plan(&mut self, now: Instant) -> Option<Chunk> {
        let id = self.choose(now)?;
        let entry = self.prompts.get_mut(&id).expect("chosen from the queue");
        let first = entry.begun.is_none();
        let begun = entry.begun.get_or_insert_with(|| begin(&mut self.residents, id, &entry.prompt));
        let range = next_range(begun, entry.prompt.tokens.len(), &self.config);
        let export = range.start.max(entry.prompt.export_from).min(range.end)..range.end;
        if !export.is_empty() {
            self.unsent.entry(id).or_default().push_back(export.len());
        }
        Some(Chunk {
            id,
            resident: begun.resident,
            held: self.residents.held(begun.resident),
            tokens: entry.prompt.tokens.clone(),
            compute: range.start >= begun.reused,
            last: range.end == entry.prompt.tokens.len(),
            range,
            export,
            reused: begun.reused,
            first,
        })
    }

    /// The engine is through with `chunk`; computing it took `took`.
    pub(crate) fn chunk_done(&mut self, chunk: &Chunk, took: Duration) {
        if chunk.compute {
            self.residents.grew(chunk.resident, &chunk.tokens, chunk.range.clone());
            self.learn(chunk.range.len(), took);
        }
        let Some(entry) = self.prompts.get_mut(&chunk.id) else { return };
        let begun = entry.begun.as_mut().expect("planned before");
        begun.done = chunk.range.end;
        if chunk.last {
            self.take_out(chunk.id);
        }
    }

    /// The engine could not compute `chunk`; its session is empty now and the
    /// prompt is gone.
    pub(crate) fn chunk_failed(&mut self, chunk: &Chunk) {
        self.residents.cleared(chunk.resident);
        self.remove(chunk.id);
    }

    /// Figures for the status.
    pub(crate) fn figures(&self) -> QueueFigures {
        QueueFigures {
            queue_tokens: self.queue_tokens(),
            residents_used: self.residents.used(),
            held_tokens: self.residents.held_tokens(),
        }
    }

    fn choose(&self, now: Instant) -> Option<PromptId> {
        let waiting: usize = self.unsent.values().flatten().sum();
        let room = waiting + self.config.chunk_tokens <= self.unsent_tokens_max;
        let few = |id: &PromptId| self.unsent.get(id).is_none_or(|chunks| chunks.len() < UNSENT_CHUNKS_FREE);
        let runnable = |id: &PromptId, entry: &Entry| match &entry.begun {
            Some(_) => room || few(id),
            None => self.residents.has_idle(),
        };
        self.prompts
            .iter()
            .filter(|(id, entry)| runnable(id, entry))
            .min_by(|(_, a), (_, b)| self.key(a, now).total_cmp(&self.key(b, now)))
            .map(|(&id, _)| id)
    }

    /// `arrived + remaining / ageing` in seconds, relative to `now`. Equal keys
    /// go by id, that is by arrival.
    fn key(&self, entry: &Entry, now: Instant) -> f64 {
        let waited = now.saturating_duration_since(entry.arrived).as_secs_f64();
        entry.remaining() as f64 * self.seconds_per_token() / AGEING - waited
    }

    /// Tokens that are computed before `newcomer` begins, if nobody else comes:
    /// those of prompts that precede it, and of residents in its way.
    fn tokens_ahead_of(&self, newcomer: &Entry, now: Instant) -> usize {
        let key = self.key(newcomer, now);
        let no_room = !self.residents.has_idle();
        let ahead = |entry: &&Entry| self.key(entry, now) <= key || (no_room && entry.begun.is_some());
        self.prompts.values().filter(ahead).map(Entry::remaining).sum()
    }

    fn queue_tokens(&self) -> usize {
        self.prompts.values().map(Entry::remaining).sum()
    }

    fn seconds_per_token(&self) -> f64 {
        self.seconds_per_token.unwrap_or(SECONDS_PER_TOKEN_AT_FIRST)
    }

    fn learn(&mut self, tokens: usize, took: Duration) {
        let measured = took.as_secs_f64() / tokens.max(1) as f64;
        self.seconds_per_token = Some(match self.seconds_per_token {
            Some(known) => known + RATE_WEIGHT * (measured - known),
            None => measured,
        });
    }
}

impl Entry {
    /// Tokens still to compute.
    fn remaining(&self) -> usize {
        let has = self.begun.as_ref().map_or(0, |begun| begun.done.max(begun.reused));
        self.prompt.tokens.len() - has
    }
}

fn begin(residents: &mut Residents, id: PromptId, prompt: &Prompt) -> Begun {
    let (resident, reused) = residents.take(id, &prompt.tokens, prompt.isolation);
    // Reused tokens that the receiver has need neither compute nor export.
    Begun { resident, reused, done: reused.min(prompt.export_from) }
}

/// A chunk holds either reused tokens, to be exported, or tokens to compute.
fn next_range(begun: &Begun, end: usize, config: &SchedulerConfig) -> Range<usize> {
    let stop = if begun.done < begun.reused { begun.reused } else { end };
    begun.done..(begun.done + config.chunk_tokens).min(stop)
}
