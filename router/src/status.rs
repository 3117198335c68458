//! `/mesh/status`: the mesh in one JSON document. Pure.

use std::time::Instant;

use kv_block::{Fingerprint, LayoutId};
use kv_transfer::Role;
use serde::Serialize;

use crate::registry::{Node, Registry};

/// The document.
#[derive(Debug, Serialize)]
pub(crate) struct MeshStatus {
    model: String,
    draining: bool,
    #[serde(flatten)]
    totals: Totals,
    nodes: Vec<NodeStatus>,
}

#[derive(Debug, Serialize)]
struct Totals {
    /// Generation requests that the router has and not ended.
    requests_in_flight: u64,
    /// Each handoff once, as long as either side has it.
    handoffs_active: u64,
    /// On all nodes.
    staged_bytes: u64,
    /// On decode nodes.
    slots_used: u64,
}

#[derive(Debug, Serialize)]
struct NodeStatus {
    name: String,
    role: &'static str,
    pid: u32,
    address: String,
    healthy: bool,
    draining: bool,
    model: String,
    fingerprint: String,
    layout: String,
    block_tokens: u32,
    context_tokens: u32,
    /// Why it takes no remote prefill; empty if it does.
    blocks_unsupported: String,
    slots: u32,
    slots_used: u32,
    requests_in_flight: u32,
    handoffs_active: u32,
    staged_bytes: u64,
    queue_tokens: u64,
    kv_used_tokens: u64,
    kv_total_tokens: u64,
    prefill_tokens_total: u64,
    installed_tokens_total: u64,
    generated_tokens_total: u64,
    transfer_bytes_total: u64,
    handoffs_completed_total: u64,
    handoffs_failed_total: u64,
    handoff_micros_total: u64,
    handoff_tail_micros_total: u64,
    late_frames_total: u64,
    steps_total: u64,
    step_micros_max: u64,
}

impl MeshStatus {
    pub(crate) fn new<L: Clone>(
        now: Instant,
        model: &str,
        draining: bool,
        requests_in_flight: u64,
        registry: &Registry<L>,
    ) -> Self {
        let sum = |role, figure: fn(&kv_transfer::Status) -> u64| -> u64 {
            registry.nodes().filter(|node| node.role == role).map(|node| figure(&node.status)).sum()
        };
        let handoffs = |role| sum(role, |status| u64::from(status.handoffs_active));
        let staged = |role| sum(role, |status| status.staged_bytes);
        let totals = Totals {
            requests_in_flight,
            handoffs_active: handoffs(Role::Decode).max(handoffs(Role::Prefill)),
            staged_bytes: staged(Role::Decode) + staged(Role::Prefill),
            slots_used: sum(Role::Decode, |status| u64::from(status.slots_used)),
        };
        let nodes = registry.nodes().map(|node| node_status(now, node)).collect();
        Self { model: model.to_owned(), draining, totals, nodes }
    }
}

fn node_status<L>(now: Instant, node: &Node<L>) -> NodeStatus {
    let (hello, status) = (&node.hello, &node.status);
    NodeStatus {
        name: hello.name.clone(),
        role: node.role.as_str(),
        pid: hello.pid,
        address: hello.address.clone(),
        healthy: node.healthy(now),
        draining: node.is_draining(),
        model: hello.model.clone(),
        fingerprint: Fingerprint(hello.fingerprint).to_string(),
        layout: LayoutId(hello.layout).to_string(),
        block_tokens: hello.block_tokens,
        context_tokens: hello.context_tokens,
        blocks_unsupported: hello.blocks_unsupported.clone(),
        slots: hello.slots,
        slots_used: status.slots_used,
        requests_in_flight: status.requests_in_flight,
        handoffs_active: status.handoffs_active,
        staged_bytes: status.staged_bytes,
        queue_tokens: status.queue_tokens,
        kv_used_tokens: status.kv_used_tokens,
        kv_total_tokens: status.kv_total_tokens,
        prefill_tokens_total: status.prefill_tokens_total,
        installed_tokens_total: status.installed_tokens_total,
        generated_tokens_total: status.generated_tokens_total,
        transfer_bytes_total: status.transfer_bytes_total,
        handoffs_completed_total: status.handoffs_completed_total,
        handoffs_failed_total: status.handoffs_failed_total,
        handoff_micros_total: status.handoff_micros_total,
        handoff_tail_micros_total: status.handoff_tail_micros_total,
        late_frames_total: status.late_frames_total,
        steps_total: status.steps_total,
        step_micros_max: status.step_micros_max,
    }
}
