//! Figures of the node, gathered from its tasks and published as `NodeState`.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use kv_transfer::Status;
use kv_transfer::membership::NodeState;
use tokio::sync::{Notify, watch};

use crate::runner::RunnerState;

/// Counters that several tasks touch. Totals count from the start of the node.
#[derive(Debug, Default)]
pub(crate) struct Stats {
    requests_in_flight: AtomicI64,
    handoffs_active: AtomicI64,
    staged_bytes: AtomicI64,
    pub(crate) transfer_bytes: AtomicU64,
    pub(crate) handoffs_completed: AtomicU64,
    pub(crate) handoffs_failed: AtomicU64,
    pub(crate) handoff_micros: AtomicU64,
    pub(crate) handoff_tail_micros: AtomicU64,
    pub(crate) late_frames: AtomicU64,
    engine: Mutex<EngineFigures>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct EngineFigures {
    state: RunnerState,
    warm: Vec<Vec<[u8; 32]>>,
}

/// Counts as one of something until it is dropped, so that no path forgets.
#[derive(Debug)]
pub(crate) struct Counted {
    stats: Arc<Stats>,
    gauge: fn(&Stats) -> &AtomicI64,
    amount: i64,
}

impl Counted {
    fn new(stats: &Arc<Stats>, gauge: fn(&Stats) -> &AtomicI64) -> Self {
        Self { stats: stats.clone(), gauge, amount: 0 }
    }

    /// Sets how much this one counts.
    pub(crate) fn set(&mut self, amount: i64) {
        if amount != self.amount {
            (self.gauge)(&self.stats).fetch_add(amount - self.amount, Relaxed);
            self.amount = amount;
            self.stats.changed.notify_one();
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.set(0);
    }
}

impl Stats {
    pub(crate) fn request(self: &Arc<Self>) -> Counted {
        let mut counted = Counted::new(self, |stats| &stats.requests_in_flight);
        counted.set(1);
        counted
    }

    pub(crate) fn handoff(self: &Arc<Self>) -> Counted {
        let mut counted = Counted::new(self, |stats| &stats.handoffs_active);
        counted.set(1);
        counted
    }

    pub(crate) fn staged(self: &Arc<Self>) -> Counted {
        Counted::new(self, |stats| &stats.staged_bytes)
    }

    pub(crate) fn requests(&self) -> usize {
        usize::try_from(self.requests_in_flight.load(Relaxed)).unwrap_or(0)
    }

    /// From the engine thread; `warm` only when it changed.
    pub(crate) fn publish_engine(&self, state: RunnerState, warm: Option<Vec<Vec<[u8; 32]>>>) {
        let mut engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        engine.state = state;
        if let Some(warm) = warm {
            engine.warm = warm;
        }
        drop(engine);
        self.changed.notify_one();
    }

    fn node_state(&self, kv_total_tokens: u64, draining: bool) -> NodeState {
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        let gauge = |value: &AtomicI64| u64::try_from(value.load(Relaxed)).unwrap_or(0);
        let status = Status {
            sequence: 0,
            slots_used: engine.state.slots_used as u32,
            requests_in_flight: gauge(&self.requests_in_flight) as u32,
            handoffs_active: gauge(&self.handoffs_active) as u32,
            staged_bytes: gauge(&self.staged_bytes),
            queue_tokens: engine.state.queue_tokens as u64,
            kv_used_tokens: engine.state.kv_used_tokens as u64,
            kv_total_tokens,
            prefill_tokens_total: engine.state.prefill_tokens,
            installed_tokens_total: engine.state.installed_tokens,
            generated_tokens_total: engine.state.generated_tokens,
            transfer_bytes_total: self.transfer_bytes.load(Relaxed),
            handoffs_completed_total: self.handoffs_completed.load(Relaxed),
            handoffs_failed_total: self.handoffs_failed.load(Relaxed),
            handoff_micros_total: self.handoff_micros.load(Relaxed),
            handoff_tail_micros_total: self.handoff_tail_micros.load(Relaxed),
            late_frames_total: self.late_frames.load(Relaxed),
            steps_total: engine.state.steps,
            step_micros_max: engine.state.step_micros_max,
        };
        NodeState { status, warm: engine.warm.clone(), draining }
    }
}

/// Keeps `state` up to date until the node ends.
pub(crate) async fn publish(
    stats: Arc<Stats>,
    kv_total_tokens: u64,
    draining: watch::Receiver<bool>,
    state: watch::Sender<NodeState>,
) {
    let mut draining = draining;
    loop {
        let snapshot = stats.node_state(kv_total_tokens, *draining.borrow_and_update());
        if state.send(snapshot).is_err() {
            return;
        }
        tokio::select! {
            biased;
            () = stats.changed.notified() => {}
            changed = draining.changed() => if changed.is_err() { return },
        }
    }
}
