//! The prefill node's side of one handoff.
//!
//! ```text
//!          started            finished, unsent           all sent
//!  Queued ────────▶ Computing ────────────────▶ Draining ────────▶ AwaitingInstall
//!    │                  │ └─────── finished and sent ──────────────────▲ │
//!    └──────────────────┴── failed, cancelled, lost, stalled ──▶ Ended ◀─┘ installed
//!
//!  a block:  encoded ─▶ waiting ─(credit for all of it)─▶ under way ─▶ sent, freed
//! ```
//!
//! Invariants: bytes ordered to be sent ≤ credit received; every encoded byte
//! is released once; `End` is the last action and comes once. With `End` the
//! shell also resets whatever frame streams are still open.

mod table;
#[cfg(test)]
mod tests;
mod types;

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

pub use types::{SenderAction, SenderEvent, SenderOutcome, SenderPlan, SenderState};

use crate::HandoffError;
use table::{Ending, Step, Trigger};

/// With the manifest sent nothing is held here any more, and the receiver may
/// wait for a free slot as long as other answers take. So this only catches a
/// receiver that forgot: an hour at a stall of 30 s.
const INSTALL_STALLS: u32 = 120;

/// The state machine.
#[derive(Debug)]
pub struct Sender {
    plan: SenderPlan,
    state: SenderState,
    actions: VecDeque<SenderAction>,
    /// Index of the block that must be encoded next.
    next_block: usize,
    /// Encoded blocks without credit yet: index and bytes, in order.
    waiting: VecDeque<(usize, u64)>,
    /// Blocks that the shell is sending: bytes by index.
    under_way: BTreeMap<usize, u64>,
    staged_bytes: u64,
    encoded_bytes: u64,
    released_bytes: u64,
    credit_bytes: u64,
    spent_bytes: u64,
    /// Since when the receiver owes a word; `None` while it owes none.
    waiting_since: Option<Instant>,
    ends: u32,
}

impl Sender {
    /// A handoff just accepted into the queue.
    pub fn new(_now: Instant, plan: SenderPlan) -> Self {
        Self {
            state: SenderState::Queued,
            actions: VecDeque::new(),
            next_block: plan.first_block,
            waiting: VecDeque::new(),
            under_way: BTreeMap::new(),
            staged_bytes: 0,
            encoded_bytes: 0,
            released_bytes: 0,
            credit_bytes: plan.credit_bytes,
            spent_bytes: 0,
            waiting_since: None,
            ends: 0,
            plan,
        }
    }

    /// Takes in what happened. A late event after the end is ignored; an event
    /// that this state does not allow is an error and changes nothing.
    pub fn handle(&mut self, now: Instant, event: SenderEvent) -> Result<(), HandoffError> {
        let trigger = self.judge(now, &event);
        match table::step(self.state, trigger) {
            Step::Ignore => {}
            Step::Bug => return Err(HandoffError { state: self.state.name(), event: event.name() }),
            Step::End(ending) => self.end(ending),
            Step::To(state) => {
                self.absorb(&event);
                self.send_what_credit_allows();
                self.enter(state);
                self.watch_the_peer(now, &event);
            }
        }
        Ok(())
    }

    /// Next order; drain after each `handle`.
    pub fn poll_action(&mut self) -> Option<SenderAction> {
        self.actions.pop_front()
    }

    /// When to report `DeadlinePassed`, if at all.
    pub fn next_deadline(&self) -> Option<Instant> {
        let patience = match self.state {
            SenderState::AwaitingInstall => self.plan.stall.saturating_mul(INSTALL_STALLS),
            _ => self.plan.stall,
        };
        self.waiting_since?.checked_add(patience)
    }

    /// Where it stands.
    pub fn state(&self) -> SenderState {
        self.state
    }

    /// Encoded bytes waiting or being sent.
    pub fn staged_bytes(&self) -> u64 {
        self.staged_bytes
    }

    /// Panics if the books do not balance. For tests and simulations.
    #[doc(hidden)]
    pub fn check_invariants(&self) {
        assert!(self.spent_bytes <= self.credit_bytes, "more bytes sent than credit received");
        let held: u64 =
            self.waiting.iter().map(|(_, bytes)| bytes).sum::<u64>() + self.under_way.values().sum::<u64>();
        assert_eq!(self.staged_bytes, held, "staged bytes");
        assert_eq!(self.encoded_bytes, self.staged_bytes + self.released_bytes, "every byte is freed once");
        let ended = self.state == SenderState::Ended;
        assert_eq!(self.ends, u32::from(ended), "an ended handoff ends once");
        assert!(!ended || self.staged_bytes == 0, "an ended handoff stages nothing");
        if self.state == SenderState::AwaitingInstall {
            assert_eq!((self.next_block, held), (self.plan.block_count, 0), "manifest before the last block");
        }
    }

    /// Turns an event into what it means here. Changes nothing.
    fn judge(&self, now: Instant, event: &SenderEvent) -> Trigger {
        match *event {
            SenderEvent::ComputeStarted => Trigger::ComputeStarted,
            SenderEvent::BlockEncoded { index, .. } => {
                let expected = index == self.next_block && index < self.plan.block_count;
                if expected { Trigger::BlockEncoded } else { Trigger::BlockUnexpected }
            }
            SenderEvent::ComputeFinished if self.next_block < self.plan.block_count => Trigger::FinishedShort,
            SenderEvent::ComputeFinished if self.unsent_blocks() > 0 => Trigger::FinishedUnsent,
            SenderEvent::ComputeFinished => Trigger::FinishedSent,
            SenderEvent::ComputeFailed => Trigger::ComputeFailed,
            SenderEvent::BlockSent { index } if !self.under_way.contains_key(&index) => Trigger::BlockUnknown,
            SenderEvent::BlockSent { .. } if self.unsent_blocks() > 1 => Trigger::BlockSent,
            SenderEvent::BlockSent { .. } => Trigger::LastBlockSent,
            SenderEvent::CreditReceived { .. } => Trigger::Credit,
            SenderEvent::InstalledReceived => Trigger::Installed,
            SenderEvent::CancelReceived => Trigger::CancelReceived,
            SenderEvent::CancelRequested => Trigger::CancelRequested,
            SenderEvent::PeerLost => Trigger::PeerLost,
            SenderEvent::DeadlinePassed => match self.next_deadline() {
                Some(deadline) if deadline <= now => Trigger::Stalled,
                _ => Trigger::WokeEarly,
            },
        }
    }

    /// Takes in the facts of an event that the table allows.
    fn absorb(&mut self, event: &SenderEvent) {
        match *event {
            SenderEvent::BlockEncoded { index, bytes } => {
                self.waiting.push_back((index, bytes));
                self.next_block = index + 1;
                self.staged_bytes += bytes;
                self.encoded_bytes += bytes;
            }
            SenderEvent::BlockSent { index } => {
                let bytes = self.under_way.remove(&index).unwrap_or(0);
                self.release(bytes);
            }
            // Saturates: a peer that grants absurd amounts only harms itself.
            SenderEvent::CreditReceived { bytes } => {
                self.credit_bytes = self.credit_bytes.saturating_add(bytes);
            }
            _ => {}
        }
    }

    /// Whole blocks, in order: a block that does not fit holds back the rest.
    fn send_what_credit_allows(&mut self) {
        while let Some(&(index, bytes)) = self.waiting.front() {
            if bytes > self.credit_bytes - self.spent_bytes {
                return;
            }
            self.waiting.pop_front();
            self.spent_bytes += bytes;
            self.under_way.insert(index, bytes);
            self.actions.push_back(SenderAction::SendBlock { index });
        }
    }

    /// The receiver owes a word while a block waits for credit or for its
    /// stream, or the manifest for its answer. Computing is no concern of its.
    fn watch_the_peer(&mut self, now: Instant, event: &SenderEvent) {
        let owes = self.state == SenderState::AwaitingInstall || self.unsent_blocks() > 0;
        let word = matches!(event, SenderEvent::CreditReceived { .. } | SenderEvent::BlockSent { .. });
        self.waiting_since = match self.waiting_since {
            _ if !owes => None,
            Some(since) if !word => Some(since),
            _ => Some(now),
        };
    }

    fn unsent_blocks(&self) -> usize {
        self.waiting.len() + self.under_way.len()
    }

    fn enter(&mut self, state: SenderState) {
        if state == SenderState::AwaitingInstall && self.state != state {
            self.actions.push_back(SenderAction::SendComplete {
                block_count: self.plan.block_count.saturating_sub(self.plan.first_block),
                token_count: self.plan.token_count,
                digest: self.plan.digest,
            });
        }
        self.state = state;
    }

    fn end(&mut self, ending: Ending) {
        let computing = matches!(self.state, SenderState::Queued | SenderState::Computing);
        if computing && ending != Ending::ComputeFailed {
            self.actions.push_back(SenderAction::StopComputing);
        }
        if let Some(reason) = ending.message() {
            self.actions.push_back(SenderAction::SendCancel { reason });
        }
        self.waiting.clear();
        self.under_way.clear();
        self.release(self.staged_bytes);
        self.actions.push_back(SenderAction::End(ending.outcome()));
        self.ends += 1;
        self.waiting_since = None;
        self.state = SenderState::Ended;
    }

    fn release(&mut self, bytes: u64) {
        self.staged_bytes -= bytes;
        self.released_bytes += bytes;
        if bytes > 0 {
            self.actions.push_back(SenderAction::ReleaseStaged { bytes });
        }
    }
}

impl Ending {
    /// What the receiver is told, if it is there to be told.
    fn message(self) -> Option<&'static str> {
        match self {
            Self::Installed | Self::CancelledByPeer | Self::PeerLost => None,
            Self::Cancelled(reason) => Some(reason),
            Self::Stalled => Some("decode node gave no credit in time"),
            Self::ComputeFailed => Some("engine could not compute the prompt"),
        }
    }

    fn outcome(self) -> SenderOutcome {
        match self {
            Self::Installed => SenderOutcome::Installed,
            Self::CancelledByPeer | Self::Cancelled(_) => SenderOutcome::Cancelled,
            Self::PeerLost => SenderOutcome::PeerLost,
            Self::Stalled => SenderOutcome::Stalled,
            Self::ComputeFailed => SenderOutcome::ComputeFailed,
        }
    }
}
