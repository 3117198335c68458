//! What the router itself has given to a node and the node may not know yet.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counted by reservations; read with every choice.
#[derive(Debug, Default)]
pub(crate) struct NodeLoad {
    requests: AtomicU64,
    tokens: AtomicU64,
}

impl NodeLoad {
    /// Requests placed and not ended.
    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Prompt tokens given and not known to be computed.
    pub(crate) fn tokens(&self) -> u64 {
        self.tokens.load(Ordering::Relaxed)
    }
}

/// One request's share of a node's load; given back when dropped, on whatever
/// path that happens.
#[derive(Debug)]
pub(crate) struct Reservation {
    load: Arc<NodeLoad>,
    tokens: u64,
}

impl Reservation {
    pub(crate) fn new(load: &Arc<NodeLoad>, tokens: u64) -> Self {
        load.requests.fetch_add(1, Ordering::Relaxed);
        load.tokens.fetch_add(tokens, Ordering::Relaxed);
        Self { load: load.clone(), tokens }
    }

    /// The prompt is computed; the request still runs.
    pub(crate) fn prompt_done(&mut self) {
        self.load.tokens.fetch_sub(std::mem::take(&mut self.tokens), Ordering::Relaxed);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.prompt_done();
        self.load.requests.fetch_sub(1, Ordering::Relaxed);
    }
}
