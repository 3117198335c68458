//! The figures that the node publishes, in one place. Everything that holds
//! something of a handoff does so through a guard that gives it back when
//! dropped, however the handoff ends.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kv_transfer::Status;
use kv_transfer::membership::NodeState;
use tokio::sync::watch;

use crate::scheduler::QueueFigures;

/// Writes the node's status; cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Board {
    state: Arc<watch::Sender<NodeState>>,
    /// Since when the engine has been at its present chunk.
    at_work_since: Arc<Mutex<Option<Instant>>>,
}

impl Board {
    /// A board of an idle node that can hold `kv_total_tokens`.
    pub(crate) fn new(kv_total_tokens: usize) -> Self {
        let status = Status { kv_total_tokens: kv_total_tokens as u64, ..Status::default() };
        let state = NodeState { status, warm: Vec::new(), draining: false };
        Self { state: Arc::new(watch::Sender::new(state)), at_work_since: Arc::default() }
    }

    /// What the membership task sends to the router.
    pub(crate) fn subscribe(&self) -> watch::Receiver<NodeState> {
        self.state.subscribe()
    }

    /// The node takes no new handoffs from now on.
    pub(crate) fn drain(&self) {
        self.state.send_modify(|state| state.draining = true);
    }

    /// The queue as it is now.
    pub(crate) fn queue(&self, figures: QueueFigures) {
        self.update(|status| {
            status.queue_tokens = figures.queue_tokens as u64;
            status.slots_used = figures.residents_used as u32;
            status.kv_used_tokens = figures.held_tokens as u64;
        });
    }

    /// The engine computed `tokens` in one step.
    pub(crate) fn stepped(&self, tokens: usize, micros_max: u64) {
        self.update(|status| {
            status.prefill_tokens_total += tokens as u64;
            status.steps_total += 1;
            status.step_micros_max = micros_max;
        });
    }

    /// The engine begins a chunk, or has none any more.
    pub(crate) fn at_work(&self, since: Option<Instant>) {
        *self.at_work_since.lock().unwrap_or_else(PoisonError::into_inner) = since;
    }

    /// Since when the engine has been at its present chunk, if it has one, and
    /// how long the slowest step of late took.
    pub(crate) fn work(&self) -> (Option<Instant>, Duration) {
        let since = *self.at_work_since.lock().unwrap_or_else(PoisonError::into_inner);
        (since, Duration::from_micros(self.state.borrow().status.step_micros_max))
    }

    /// The network took so many encoded bytes.
    pub(crate) fn sent(&self, bytes: u64) {
        self.update(|status| status.transfer_bytes_total += bytes);
    }

    /// A handoff begins.
    pub(crate) fn handoff(&self) -> HandoffGuard {
        self.update(|status| {
            status.handoffs_active += 1;
            status.requests_in_flight += 1;
        });
        HandoffGuard { board: self.clone(), staged: 0, completed: false }
    }

    fn update(&self, change: impl FnOnce(&mut Status)) {
        self.state.send_modify(|state| change(&mut state.status));
    }
}

/// One handoff's share of the figures.
#[derive(Debug)]
pub(crate) struct HandoffGuard {
    board: Board,
    staged: u64,
    completed: bool,
}

impl HandoffGuard {
    /// The handoff now holds so many encoded bytes.
    pub(crate) fn staged(&mut self, bytes: u64) {
        if bytes == self.staged {
            return;
        }
        let before = std::mem::replace(&mut self.staged, bytes);
        self.board.update(|status| status.staged_bytes = status.staged_bytes - before + bytes);
    }

    /// The handoff ended well.
    pub(crate) fn completed(&mut self) {
        self.completed = true;
    }
}

impl Drop for HandoffGuard {
    fn drop(&mut self) {
        self.staged(0);
        self.board.update(|status| {
            status.handoffs_active -= 1;
            status.requests_in_flight -= 1;
            match self.completed {
                true => status.handoffs_completed_total += 1,
                false => status.handoffs_failed_total += 1,
            }
        });
    }
}
