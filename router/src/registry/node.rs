//! One node's record.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_block::LayoutId;
use kv_transfer::{Hello, Role, Status};

use super::{NodeLoad, Registration, STALE_AFTER, WARM_UP};
use crate::policy::{DecodeView, PrefillView};
use crate::prefix_view::PrefixView;

/// A registered node.
#[derive(Debug)]
pub(crate) struct Node<L> {
    pub(super) number: u64,
    pub(super) draining: bool,
    pub(super) prefix: PrefixView,
    pub(crate) role: Role,
    pub(crate) hello: Hello,
    pub(crate) status: Status,
    pub(crate) load: Arc<NodeLoad>,
    pub(crate) link: L,
    heard: Instant,
    /// When its work last moved, or it had none.
    moved: Instant,
    /// Since when it has been healthy without a break.
    healthy_since: Instant,
    frozen_after: Duration,
}

impl<L> Node<L> {
    pub(super) fn new(
        number: u64,
        now: Instant,
        role: Role,
        hello: Hello,
        link: L,
        frozen_after: Duration,
    ) -> Self {
        let blocks_max = (hello.context_tokens / hello.block_tokens) as usize;
        Self {
            number,
            draining: false,
            prefix: PrefixView::new((hello.slots as usize).min(usize::from(u16::MAX)), blocks_max),
            role,
            hello,
            status: Status::default(),
            load: Arc::default(),
            link,
            heard: now,
            moved: now,
            healthy_since: now,
            frozen_after,
        }
    }

    /// This life of the node.
    pub(crate) fn registration(&self) -> Registration {
        Registration { name: self.hello.name.clone(), number: self.number }
    }

    /// Whether this is that life of that node.
    pub(super) fn is(&self, registration: &Registration) -> bool {
        self.number == registration.number
    }

    pub(super) fn take_status(&mut self, now: Instant, status: Status) {
        if status.sequence < self.status.sequence {
            return;
        }
        let was_healthy = self.healthy(now);
        if idle(&status) || progress(&status) != progress(&self.status) {
            self.moved = now;
        }
        self.heard = now;
        self.status = status;
        if !was_healthy {
            self.healthy_since = now;
        }
    }

    /// 1 for a node that has just become healthy, down to 0 in [`WARM_UP`].
    pub(super) fn newness(&self, now: Instant) -> f64 {
        let age = now.saturating_duration_since(self.healthy_since);
        1.0 - (age.as_secs_f64() / WARM_UP.as_secs_f64()).min(1.0)
    }

    /// Whether its status is fresh and its engine moves.
    pub(crate) fn healthy(&self, now: Instant) -> bool {
        !self.silent(now) && !self.frozen(now)
    }

    /// Whether it has told nothing for too long: it or the way to it is gone, or
    /// stands still.
    pub(crate) fn silent(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.heard) > STALE_AFTER
    }

    /// Whether its engine has work and does not move. It may go on telling its
    /// status all the while.
    pub(crate) fn frozen(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.moved) > self.frozen_after
    }

    /// Whether it takes no new requests.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining
    }

    pub(super) fn layout(&self) -> LayoutId {
        LayoutId(self.hello.layout)
    }

    pub(super) fn block_tokens(&self) -> usize {
        self.hello.block_tokens as usize
    }

    /// Why blocks cannot pass between this node and the one that says `hello`,
    /// naming both values.
    pub(super) fn misfit(&self, hello: &Hello) -> Option<String> {
        let ours = &self.hello;
        let differs = |what: &str, theirs: &dyn std::fmt::Display, here: &dyn std::fmt::Display| {
            Some(format!("{what} of {} is {theirs}, of {} {here}", hello.name, ours.name))
        };
        if hello.block_tokens != ours.block_tokens {
            return differs("block_tokens", &hello.block_tokens, &ours.block_tokens);
        }
        if hello.layout != ours.layout {
            return differs("KV layout", &LayoutId(hello.layout), &LayoutId(ours.layout));
        }
        None
    }

    /// Whether this prefill node's blocks can be installed on `decode`.
    pub(super) fn serves(&self, decode: &Self) -> bool {
        self.hello.layout == decode.hello.layout
            && self.hello.block_tokens == decode.hello.block_tokens
            && self.hello.blocks_unsupported.is_empty()
    }

    pub(super) fn decode_view(&self, cached_tokens: usize, prefill: Vec<PrefillView>) -> DecodeView {
        DecodeView {
            name: self.hello.name.clone(),
            cached_tokens,
            requests_in_flight: self.requests_in_flight(),
            queue_tokens: self.queue_tokens(),
            slots: self.hello.slots as usize,
            slots_used: self.status.slots_used as usize,
            context_tokens: self.hello.context_tokens as usize,
            installs_blocks: self.hello.blocks_unsupported.is_empty(),
            prefill,
        }
    }

    pub(super) fn prefill_view(&self) -> PrefillView {
        PrefillView {
            name: self.hello.name.clone(),
            queue_tokens: self.queue_tokens(),
            context_tokens: self.hello.context_tokens as usize,
        }
    }

    /// The router is the only source of requests, so its own count is right at
    /// once; the node's is larger while it cleans up.
    pub(super) fn requests_in_flight(&self) -> usize {
        self.load.requests().max(u64::from(self.status.requests_in_flight)) as usize
    }

    fn queue_tokens(&self) -> u64 {
        self.load.tokens().max(self.status.queue_tokens)
    }
}

/// Nothing to compute. A handoff under way takes no slot of a decode node, so
/// one that only waits for it is idle.
fn idle(status: &Status) -> bool {
    status.queue_tokens == 0 && status.slots_used == 0
}

fn progress(status: &Status) -> [u64; 5] {
    [
        status.steps_total,
        status.prefill_tokens_total,
        status.installed_tokens_total,
        status.generated_tokens_total,
        status.transfer_bytes_total,
    ]
}
