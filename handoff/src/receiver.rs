//! The decode node's side of one handoff.
//!
//! ```text
//!               Accepted, first frame     manifest and all rows
//!  Requested ───────────────────────▶ Receiving ─────────────▶ Installing
//!      │ refused, cancelled, lost         │ broken, cancelled      │ done, failed, cancelled
//!      └──────────────────────────────────┴──────────▶ Ended ◀─────┘
//! ```
//!
//! Frames travel on streams of their own, so they may overtake `Accepted`, and
//! `Completed` may overtake them. Only rows that are all there, under a
//! manifest that agrees with the table computed here, are ever installed.
//!
//! Invariants: arrived bytes ≤ credit given; staged bytes are released once;
//! `End` is the last action and comes once; after it frames are dropped and
//! counted.

mod credit;
mod frames;
mod patience;
mod table;
#[cfg(test)]
mod tests;
mod types;

use std::collections::VecDeque;
use std::time::Instant;

use kv_block::{ManifestDigest, Part};

pub use types::{
    FrameFacts, FrameVerdict, ReceiverAction, ReceiverEvent, ReceiverOutcome, ReceiverPlan, ReceiverState,
};

use crate::HandoffError;
use credit::Credit;
use frames::Frames;
use patience::Patience;
use table::{Ending, Step, Trigger};

/// The state machine.
#[derive(Debug)]
pub struct Receiver {
    plan: ReceiverPlan,
    state: ReceiverState,
    frames: Frames,
    credit: Credit,
    patience: Patience,
    actions: VecDeque<ReceiverAction>,
    computed_tokens: usize,
    manifest_agreed: bool,
    /// Nobody listens any more; the handoff goes on without.
    peer_gone: bool,
    staged_bytes: u64,
    released_bytes: u64,
    dropped_frames: u64,
    ends: u32,
}

impl Receiver {
    /// A handoff about to be requested; its first action is `SendRequest`.
    ///
    /// The credit is the plan's window, but never less than one block needs:
    /// the sender sends whole blocks and would wait for ever.
    pub fn new(now: Instant, plan: ReceiverPlan) -> Self {
        let frames = Frames::new(plan.table.clone(), plan.layout.clone(), plan.first_block);
        let credit = Credit::new(plan.credit_window_bytes.max(frames.block_bytes_max()));
        let request = ReceiverAction::SendRequest { credit_bytes: credit.window() };
        Self {
            state: ReceiverState::Requested,
            patience: Patience::new(now, plan.stall_min),
            frames,
            credit,
            actions: VecDeque::from([request]),
            computed_tokens: 0,
            manifest_agreed: false,
            peer_gone: false,
            staged_bytes: 0,
            released_bytes: 0,
            dropped_frames: 0,
            ends: 0,
            plan,
        }
    }

    /// Judges a frame header before its payload is read.
    pub fn admit_frame(&mut self, _now: Instant, frame: &FrameFacts) -> FrameVerdict {
        if matches!(self.state, ReceiverState::Installing | ReceiverState::Ended) {
            self.dropped_frames += 1;
            return FrameVerdict::Drop;
        }
        let place = match self.frames.check(frame) {
            Ok(place) => place,
            Err(what) => return self.violation(what),
        };
        if !self.credit.arrive(frame.encoded_bytes) {
            return self.violation("frame exceeds the credit");
        }
        if !self.frames.admit(place) {
            self.dropped_frames += 1;
            self.credit.consume(frame.encoded_bytes);
            self.return_credit();
            return FrameVerdict::Drop;
        }
        self.take(Trigger::FrameAdmitted);
        FrameVerdict::Store
    }

    /// Takes in what happened. A late event after the end is ignored; an event
    /// that this state does not allow is an error and changes nothing.
    pub fn handle(&mut self, now: Instant, event: ReceiverEvent) -> Result<(), HandoffError> {
        let trigger = self.judge(now, &event);
        match table::step(self.state, trigger) {
            Step::Ignore => {}
            Step::Bug => return Err(HandoffError { state: self.state.name(), event: event.name() }),
            Step::End(ending) => self.end(ending),
            Step::To(state) => {
                self.absorb(now, &event);
                self.enter(state);
            }
        }
        Ok(())
    }

    /// Next order; drain after each `handle` and `admit_frame`.
    pub fn poll_action(&mut self) -> Option<ReceiverAction> {
        self.actions.pop_front()
    }

    /// When to report `DeadlinePassed`, if at all.
    pub fn next_deadline(&self) -> Option<Instant> {
        match self.state {
            ReceiverState::Requested | ReceiverState::Receiving => self.patience.deadline(),
            // The engine is ours: it answers or the node is lost.
            ReceiverState::Installing | ReceiverState::Ended => None,
        }
    }

    /// Where it stands.
    pub fn state(&self) -> ReceiverState {
        self.state
    }

    /// Raw bytes stored and not yet installed or freed.
    pub fn staged_bytes(&self) -> u64 {
        self.staged_bytes
    }

    /// Late or repeated frames dropped so far.
    pub fn dropped_frames(&self) -> u64 {
        self.dropped_frames
    }

    /// Panics if the books do not balance. For tests and simulations.
    #[doc(hidden)]
    pub fn check_invariants(&self) {
        self.credit.check_invariants();
        assert_eq!(self.staged_bytes + self.released_bytes, self.frames.stored_bytes(), "staged bytes");
        let ended = self.state == ReceiverState::Ended;
        assert_eq!(self.ends, u32::from(ended), "an ended handoff ends once");
        assert!(!ended || self.staged_bytes == 0, "an ended handoff stages nothing");
        if self.state == ReceiverState::Installing {
            assert!(
                self.manifest_agreed && self.frames.missing_total() == 0,
                "installing an incomplete handoff"
            );
        }
    }

    /// Turns an event into what it means here. Changes nothing.
    fn judge(&self, now: Instant, event: &ReceiverEvent) -> Trigger {
        match *event {
            ReceiverEvent::Accepted { .. } => Trigger::Accepted,
            ReceiverEvent::Refused => Trigger::Refused,
            ReceiverEvent::Progress { .. } => Trigger::Progress,
            ReceiverEvent::FrameStored { block_index, part, encoded_bytes, intact } => {
                self.judge_stored(block_index, part, encoded_bytes, intact)
            }
            ReceiverEvent::Completed { block_count, token_count, digest } => {
                self.judge_manifest(block_count, token_count, digest)
            }
            ReceiverEvent::InstallDone => Trigger::InstallDone,
            ReceiverEvent::InstallFailed => Trigger::InstallFailed,
            ReceiverEvent::CancelRequested => Trigger::CancelRequested,
            ReceiverEvent::CancelReceived => Trigger::CancelReceived,
            ReceiverEvent::PeerLost => Trigger::PeerLost,
            ReceiverEvent::DeadlinePassed => match self.next_deadline() {
                Some(deadline) if deadline <= now => Trigger::Stalled,
                _ => Trigger::WokeEarly,
            },
        }
    }

    fn judge_stored(&self, block_index: usize, part: Part, encoded_bytes: u64, intact: bool) -> Trigger {
        match self.frames.place(block_index, part) {
            Ok(place) if self.frames.is_pending(place) && encoded_bytes <= self.credit.outstanding() => {}
            _ => return Trigger::FrameUnknown,
        }
        match (intact, self.manifest_agreed && self.frames.missing_total() == 1) {
            (false, _) => Trigger::FrameDamaged,
            (true, true) => Trigger::LastFrameStored,
            (true, false) => Trigger::FrameStored,
        }
    }

    fn judge_manifest(&self, block_count: usize, token_count: usize, digest: ManifestDigest) -> Trigger {
        let table = &self.plan.table;
        if self.manifest_agreed {
            Trigger::ManifestAgain
        } else if block_count != self.frames.block_count()
            || token_count != table.token_count()
            || digest != table.digest(self.plan.first_block)
        {
            Trigger::ManifestWrong
        } else if self.frames.missing_total() == 0 {
            Trigger::ManifestLast
        } else {
            Trigger::ManifestFirst
        }
    }

    /// Takes in the facts of an event that the table allows.
    fn absorb(&mut self, now: Instant, event: &ReceiverEvent) {
        match *event {
            ReceiverEvent::Accepted { expected_start } => self.patience.accepted(now, expected_start),
            ReceiverEvent::Progress { computed_tokens } => self.note_progress(now, computed_tokens),
            ReceiverEvent::FrameStored { block_index, part, encoded_bytes, .. } => {
                if let Ok(place) = self.frames.place(block_index, part) {
                    self.staged_bytes += self.frames.store(place);
                    self.credit.consume(encoded_bytes);
                    self.patience.worked(now);
                    self.return_credit();
                }
            }
            ReceiverEvent::Completed { .. } => self.manifest_agreed = true,
            ReceiverEvent::PeerLost | ReceiverEvent::CancelReceived | ReceiverEvent::Refused => {
                self.peer_gone = true;
            }
            _ => {}
        }
    }

    /// Any word is a sign of life; only growth resets the longer clock.
    fn note_progress(&mut self, now: Instant, computed_tokens: usize) {
        let computed = computed_tokens.min(self.plan.table.token_count());
        if computed > self.computed_tokens {
            self.computed_tokens = computed;
            self.patience.worked(now);
        } else {
            self.patience.alive(now);
        }
    }

    fn return_credit(&mut self) {
        if self.frames.missing_total() == 0 {
            return; // The sender has nothing left to send.
        }
        if let Some(bytes) = self.credit.take(self.frames.is_between_blocks()) {
            self.actions.push_back(ReceiverAction::SendCredit { bytes });
        }
    }

    fn violation(&mut self, what: &'static str) -> FrameVerdict {
        self.take(Trigger::Violation(what));
        FrameVerdict::Violation(what)
    }

    /// A step of `admit_frame`, which has no event and cannot be refused.
    fn take(&mut self, trigger: Trigger) {
        match table::step(self.state, trigger) {
            Step::To(state) => self.enter(state),
            Step::End(ending) => self.end(ending),
            Step::Ignore | Step::Bug => {}
        }
    }

    fn enter(&mut self, state: ReceiverState) {
        if state == ReceiverState::Installing && self.state != state {
            self.actions.push_back(ReceiverAction::Install);
        }
        self.state = state;
    }

    fn end(&mut self, ending: Ending) {
        let outcome = self.outcome(ending);
        match ending {
            // Acknowledged last: the rows are the engine's by now.
            Ending::Installed => {
                self.release();
                if !self.peer_gone {
                    self.actions.push_back(ReceiverAction::SendInstalled);
                }
            }
            Ending::Cancelled => self.cancel("cancelled by decode node"),
            Ending::InstallFailed => self.cancel("install failed"),
            Ending::Dropped(reason) => self.cancel(reason),
            Ending::Refused | Ending::Lost(_) => self.release(),
        }
        self.actions.push_back(ReceiverAction::End(outcome));
        self.ends += 1;
        self.state = ReceiverState::Ended;
    }

    fn outcome(&self, ending: Ending) -> ReceiverOutcome {
        match ending {
            Ending::Installed => ReceiverOutcome::Installed,
            Ending::Refused => ReceiverOutcome::Refused,
            Ending::Cancelled => ReceiverOutcome::Cancelled,
            Ending::InstallFailed => ReceiverOutcome::InstallFailed,
            Ending::Lost(reason) | Ending::Dropped(reason) => {
                ReceiverOutcome::Broken { salvaged_blocks: self.frames.contiguous_blocks(), reason }
            }
        }
    }

    fn cancel(&mut self, reason: &'static str) {
        if !self.peer_gone {
            self.actions.push_back(ReceiverAction::SendCancel { reason });
        }
        self.release();
    }

    fn release(&mut self) {
        let bytes = std::mem::take(&mut self.staged_bytes);
        self.released_bytes += bytes;
        if bytes > 0 {
            self.actions.push_back(ReceiverAction::ReleaseStaged { bytes });
        }
    }
}
