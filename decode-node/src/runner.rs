//! The decode loop without its thread: admits sequences to slots, runs steps,
//! samples, and reports. Owns the engine session.
//!
//! ```text
//!  waiting ──admit──▶ slot: [install prefix] ─▶ prefill shares ─▶ decode ─▶ warm
//! ```
//!
//! A sequence gets a slot only when it can use one: a prompt whose KV is still
//! on its way holds staging memory, not a slot, so a short one never waits for
//! a handoff.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use engine::{BatchItem, EngineError, Session, Vocabulary};
use host::Bug;
use kv_block::{BlockHash, Fingerprint, SlotId, Token};
use kv_transfer::membership::RecentMax;
use kv_transfer::{FailureKind, FinishReason};

use crate::sampler;
use crate::scheduler::{self, Plan, Share, SlotView, StepLimits};
use crate::sequence::{NewSequence, Prefix, RequestKey, SequenceEvent};
use crate::slots::SlotTable;
use crate::step_time::StepTime;

/// How the runner treats prompts.
#[derive(Clone, Copy, Debug)]
pub struct RunnerSettings {
    /// Aim for the length of a step.
    pub itl_cap_ms: f64,
    /// From so many uncomputed tokens on, a prompt is long.
    pub long_tokens: usize,
    /// Long prompts that may be prefilled at once.
    pub max_long: usize,
    /// Tokens per KV block.
    pub block_tokens: usize,
}

/// What the runner has done and holds; counters grow from the start on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunnerState {
    /// Slots with a running sequence.
    pub slots_used: usize,
    /// Prompt tokens waiting or being computed.
    pub queue_tokens: usize,
    /// Tokens resident in slots.
    pub kv_used_tokens: usize,
    /// Prompt tokens computed.
    pub prefill_tokens: u64,
    /// Prompt tokens installed.
    pub installed_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Engine steps.
    pub steps: u64,
    /// Longest step of the last seconds, in microseconds.
    pub step_micros_max: u64,
}

struct Running {
    sequence: NewSequence,
    arrived: Instant,
    cached: usize,
    installed: usize,
    long: bool,
    /// Tokens whose KV is resident: a part of the prompt, then generated ones.
    resident: Vec<Token>,
    /// Sampled, not yet in the KV.
    next: Option<Token>,
    generated: usize,
}

impl Running {
    fn remaining(&self) -> usize {
        self.sequence.tokens.len().saturating_sub(self.resident.len())
    }

    /// Whether the receiver still listens.
    fn tell(&self, event: SequenceEvent) -> bool {
        self.sequence.events.send(event).is_ok()
    }
}

/// A step that the engine has computed and whose results nobody has seen yet.
#[must_use = "its sequences wait for it"]
pub struct Step {
    plan: Plan,
    began: Instant,
    computed: Result<(), EngineError>,
}

/// The loop's state.
pub struct Runner {
    session: Box<dyn Session>,
    vocabulary: Arc<dyn Vocabulary>,
    settings: RunnerSettings,
    clock: fn() -> Instant,
    slots: SlotTable,
    running: Vec<Option<Running>>,
    waiting: VecDeque<(Instant, NewSequence)>,
    step_time: StepTime,
    slowest: RecentMax,
    state: RunnerState,
}

impl Runner {
    /// `clock` is asked when a step begins and when it ends.
    pub fn new(
        session: Box<dyn Session>,
        vocabulary: Arc<dyn Vocabulary>,
        fingerprint: Fingerprint,
        settings: RunnerSettings,
        clock: fn() -> Instant,
    ) -> Self {
        let count = session.config().slots;
        let slots = SlotTable::new(count, fingerprint, session.layout().id(), settings.block_tokens);
        Self {
            session,
            vocabulary,
            settings,
            clock,
            slots,
            running: (0..count).map(|_| None).collect(),
            waiting: VecDeque::new(),
            step_time: StepTime::default(),
            slowest: RecentMax::default(),
            state: RunnerState::default(),
        }
    }

    /// Takes a sequence in; it waits for a slot.
    pub fn enqueue(&mut self, sequence: NewSequence) {
        self.waiting.push_back(((self.clock)(), sequence));
    }

    /// Forgets a request wherever it is. What was computed stays warm.
    pub fn cancel(&mut self, key: RequestKey) {
        self.waiting.retain(|(_, sequence)| sequence.key != key);
        let slot =
            self.running.iter().position(|held| held.as_ref().is_some_and(|held| held.sequence.key == key));
        if let Some(slot) = slot {
            if host::has(Bug::SlotKept) {
                self.running[slot] = None;
                return;
            }
            self.leave(slot);
        }
    }

    /// Whether there is anything to do.
    pub fn has_work(&self) -> bool {
        !self.waiting.is_empty() || self.slots.used() > 0
    }

    /// Admits what can be admitted and runs one step. Returns whether it ran one.
    pub fn turn(&mut self) -> bool {
        let step = self.begin();
        step.map(|step| self.end(step)).is_some()
    }

    /// Admits what can be admitted and computes one step, if there is anything
    /// to compute; [`Runner::end`] has to follow.
    pub fn begin(&mut self) -> Option<Step> {
        let installed = self.admit();
        let mut views = self.views();
        // An install and the first step of its sequence each cost the running
        // streams some milliseconds; they get a token in between.
        if installed.is_some() && views.iter().any(|view| view.remaining == 0) {
            views.retain(|view| Some(view.slot) != installed);
        }
        let plan = scheduler::plan((self.clock)(), &views, &self.step_time, self.limits());
        if plan.shares.is_empty() {
            return None;
        }
        let began = (self.clock)();
        let batch: Vec<_> = plan.shares.iter().map(|share| batch_item(&self.running, share)).collect();
        let computed = self.session.step(&batch);
        Some(Step { plan, began, computed })
    }

    /// Reports what a step gave.
    pub fn end(&mut self, step: Step) {
        let Step { plan, began, computed } = step;
        if let Err(error) = computed {
            return self.fail(&plan.shares, &error);
        }
        let took = (self.clock)().saturating_duration_since(began);
        tracing::trace!(load = ?plan.load, expected_ms = self.step_time.predict_ms(plan.load), ?took, "engine step");
        self.step_time.observe(plan.load, took);
        self.state.steps += 1;
        self.slowest.record(began, took.as_micros() as u64);
        self.advance(&plan.shares);
    }

    /// Figures for the status.
    pub fn state(&mut self) -> RunnerState {
        let slots = (0..self.running.len()).map(|slot| SlotId(slot as u16));
        self.state.kv_used_tokens = slots.map(|slot| self.session.resident(slot)).sum();
        self.state.slots_used = self.slots.used();
        let waiting =
            self.waiting.iter().map(|(_, sequence)| sequence.tokens.len() - prefix_tokens(sequence));
        let running = self.running.iter().flatten().map(Running::remaining);
        self.state.queue_tokens = waiting.sum::<usize>() + running.sum::<usize>();
        self.state.step_micros_max = self.slowest.record((self.clock)(), 0);
        self.state.clone()
    }

    /// Version of the slots, and sequences waiting for one: when neither
    /// changed, there is no news but progress.
    pub fn version(&self) -> (u64, usize) {
        (self.slots.version(), self.waiting.len())
    }

    /// Hashes of the reusable blocks of each slot.
    pub fn warm_chains(&self) -> Vec<Vec<BlockHash>> {
        self.slots.warm_chains()
    }

    fn limits(&self) -> StepLimits {
        StepLimits { cap_ms: self.settings.itl_cap_ms, tokens_max: self.session.config().batch_tokens_max }
    }

    fn views(&self) -> Vec<SlotView> {
        (0u16..)
            .zip(&self.running)
            .filter_map(|(slot, held)| {
                let held = held.as_ref()?;
                Some(SlotView {
                    slot: SlotId(slot),
                    resident: held.resident.len(),
                    remaining: held.remaining(),
                    long: held.long,
                    arrived: held.arrived,
                })
            })
            .collect()
    }

    // Admission ---------------------------------------------------------------

    /// Seats what can be seated, up to one sequence that brings its KV along:
    /// its slot is returned.
    fn admit(&mut self) -> Option<SlotId> {
        // A cancel can overtake its sequence on the way here.
        self.waiting.retain(|(_, sequence)| !sequence.events.is_closed());
        let mut index = 0;
        while index < self.waiting.len() && self.slots.has_free() {
            if self.is_long(&self.waiting[index].1) && self.longs() >= self.settings.max_long {
                index += 1;
                continue;
            }
            if let Some((arrived, sequence)) = self.waiting.remove(index) {
                let brings_kv = sequence.prefix.is_some();
                let slot = self.seat(arrived, sequence);
                if brings_kv && slot.is_some() {
                    return slot;
                }
            }
        }
        None
    }

    fn is_long(&self, sequence: &NewSequence) -> bool {
        sequence.tokens.len() - prefix_tokens(sequence) >= self.settings.long_tokens
    }

    /// Long prompts that are being prefilled now.
    fn longs(&self) -> usize {
        self.running.iter().flatten().filter(|held| held.long && held.remaining() > 0).count()
    }

    /// `None` if nobody listens any more.
    fn seat(&mut self, arrived: Instant, mut sequence: NewSequence) -> Option<SlotId> {
        if sequence.events.is_closed() {
            return None;
        }
        let (slot, cached, installed) = match sequence.prefix.take() {
            Some(prefix) => self.seat_prefix(prefix),
            None => self.seat_local(&sequence),
        };
        let resident = sequence.tokens[..cached + installed].to_vec();
        let long = sequence.tokens.len() - resident.len() >= self.settings.long_tokens;
        let held = Running { sequence, arrived, cached, installed, long, resident, next: None, generated: 0 };
        self.running[usize::from(slot.0)] = Some(held);
        Some(slot)
    }

    fn seat_local(&mut self, sequence: &NewSequence) -> (SlotId, usize, usize) {
        let claim = self.slots.claim(&sequence.tokens, sequence.isolation).expect("a slot is free");
        let keep = match host::has(Bug::TruncateLate) {
            true => self.session.resident(claim.slot).min(claim.cached + 1),
            false => claim.cached,
        };
        let cached = match self.session.truncate(claim.slot, keep) {
            Ok(()) => claim.cached,
            Err(error) => {
                tracing::warn!(%error, slot = claim.slot.0, "warm slot cannot be cut, computing all");
                self.session.clear(claim.slot);
                0
            }
        };
        (claim.slot, cached, 0)
    }

    fn seat_prefix(&mut self, prefix: Prefix) -> (SlotId, usize, usize) {
        let slot = self.slots.claim_empty().expect("a slot is free");
        let result = self.session.install(slot, &prefix.blob);
        let installed = match &result {
            Ok(()) => prefix.blob.token_count(),
            Err(error) => {
                tracing::error!(%error, "prefix cannot be installed, computing it here");
                self.session.clear(slot);
                0
            }
        };
        self.state.installed_tokens += installed as u64;
        // The handoff may have been cancelled meanwhile; then nobody asks.
        let _ = prefix.installed.send(result.is_ok());
        (slot, 0, installed)
    }

    // One step ----------------------------------------------------------------

    fn advance(&mut self, shares: &[Share]) {
        for (item, share) in shares.iter().enumerate() {
            let slot = usize::from(share.slot.0);
            let Some(held) = self.running[slot].as_mut() else { continue };
            if held.remaining() > 0 {
                let from = held.resident.len();
                held.resident.extend_from_slice(&held.sequence.tokens[from..from + share.tokens]);
                self.state.prefill_tokens += share.tokens as u64;
            } else if let Some(token) = held.next.take() {
                held.resident.push(token);
            }
            if held.remaining() == 0 {
                self.emit(slot, item);
            }
        }
    }

    /// Samples the next token of `slot` from batch item `item` and reports it.
    fn emit(&mut self, slot: usize, item: usize) {
        let context = self.session.config().context_tokens;
        let Some(held) = self.running[slot].as_mut() else { return };
        let token = sampler::sample(self.session.logits(item), &held.sequence.sampling, held.resident.len());
        let mut listening = true;
        if held.generated == 0 {
            listening = held.tell(SequenceEvent::Started { cached: held.cached, installed: held.installed });
        }
        if self.vocabulary.is_end(token) && !held.sequence.ignore_end {
            held.tell(SequenceEvent::Finished(FinishReason::Stop));
            return self.leave(slot);
        }
        held.generated += 1;
        held.next = Some(token);
        self.state.generated_tokens += 1;
        listening = listening && held.tell(SequenceEvent::Token(token));
        if held.generated >= held.sequence.max_tokens || held.resident.len() >= context {
            held.tell(SequenceEvent::Finished(FinishReason::Length));
            listening = false;
        }
        if !listening {
            self.leave(slot);
        }
    }

    /// Frees `slot`; its KV stays warm.
    fn leave(&mut self, slot: usize) {
        let Some(held) = self.running[slot].take() else { return };
        self.slots.release(SlotId(slot as u16), held.resident, held.sequence.isolation);
    }

    /// The step failed: the sequences in it end with an error, the others go on.
    fn fail(&mut self, shares: &[Share], error: &EngineError) {
        tracing::error!(%error, sequences = shares.len(), "engine step failed");
        for share in shares {
            let Some(held) = self.running[usize::from(share.slot.0)].take() else { continue };
            self.session.clear(share.slot);
            self.slots.release(share.slot, Vec::new(), held.sequence.isolation);
            held.tell(SequenceEvent::Failed { kind: FailureKind::Internal, message: error.to_string() });
        }
    }
}

fn prefix_tokens(sequence: &NewSequence) -> usize {
    sequence.prefix.as_ref().map_or(0, |prefix| prefix.blob.token_count())
}

fn held_in(running: &[Option<Running>], slot: SlotId) -> &Running {
    running[usize::from(slot.0)].as_ref().expect("only running slots are planned")
}

fn batch_item<'a>(running: &'a [Option<Running>], share: &Share) -> BatchItem<'a> {
    let held = held_in(running, share.slot);
    if held.remaining() == 0 {
        return BatchItem { slot: share.slot, tokens: held.next.as_slice(), logits: true };
    }
    let from = held.resident.len();
    let tokens = &held.sequence.tokens[from..from + share.tokens];
    BatchItem { slot: share.slot, tokens, logits: share.tokens == held.remaining() }
}
