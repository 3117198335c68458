//! What to tell the router, and when.

use std::time::Duration;

use tokio::time::Instant;

use super::NodeState;
use crate::{ControlMessage, Message, Status};

/// Steps take milliseconds; the router needs no more than this.
const INTERVAL_MIN: Duration = Duration::from_millis(20);
/// A router that has heard nothing for several of these takes the node for lost.
const INTERVAL_MAX: Duration = Duration::from_millis(250);
/// Blocks of a slot that fit into one message. The prefix that is told is still
/// true when the slot holds more.
const WARM_HASHES_MAX: usize = (ControlMessage::BYTES_MAX - 1024) / size_of::<[u8; 32]>();

/// Remembers what the router was told on one connection.
pub(super) struct Announcer {
    status: Option<Status>,
    warm: Vec<Vec<[u8; 32]>>,
    draining: bool,
    changed: bool,
    /// Nothing is sent before.
    earliest: Instant,
    /// A status is sent by then.
    latest: Instant,
}

impl Announcer {
    /// For a router that knows nothing of the node yet.
    pub(super) fn new(now: Instant) -> Self {
        Self { status: None, warm: Vec::new(), draining: false, changed: true, earliest: now, latest: now }
    }

    /// The node's state has changed.
    pub(super) fn note_change(&mut self) {
        self.changed = true;
    }

    /// When to ask [`Announcer::due`] again, unless the state changes before.
    pub(super) fn next_deadline(&self) -> Instant {
        if self.changed { self.earliest } else { self.latest }
    }

    /// Messages to send now. `sequence` is the last one used for a status.
    pub(super) fn due(&mut self, now: Instant, state: &NodeState, sequence: &mut u64) -> Vec<ControlMessage> {
        if now < self.next_deadline() {
            return Vec::new();
        }
        let mut messages = self.warm_changes(&state.warm);
        if state.draining && !self.draining {
            self.draining = true;
            messages.push(ControlMessage::Draining);
        }
        if now >= self.latest || self.status.as_ref() != Some(&state.status) {
            *sequence += 1;
            self.status = Some(state.status.clone());
            self.latest = now + INTERVAL_MAX;
            messages.push(ControlMessage::Status(Status { sequence: *sequence, ..state.status.clone() }));
        }
        self.changed = false;
        self.earliest = now + INTERVAL_MIN;
        messages
    }

    fn warm_changes(&mut self, warm: &[Vec<[u8; 32]>]) -> Vec<ControlMessage> {
        if self.warm.len() < warm.len() {
            self.warm.resize(warm.len(), Vec::new());
        }
        let none = Vec::new();
        let mut messages = Vec::new();
        for (slot, told) in (0u16..).zip(&mut self.warm) {
            let hashes = warm.get(usize::from(slot)).unwrap_or(&none);
            if told != hashes {
                told.clone_from(hashes);
                let hashes = hashes[..hashes.len().min(WARM_HASHES_MAX)].to_vec();
                messages.push(ControlMessage::Warm { slot, hashes });
            }
        }
        messages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[expect(clippy::disallowed_methods, reason = "an arbitrary start of virtual time")]
    fn start() -> Instant {
        Instant::now()
    }

    fn statuses(messages: &[ControlMessage]) -> Vec<u64> {
        let status = |message: &ControlMessage| match message {
            ControlMessage::Status(status) => Some(status.sequence),
            _ => None,
        };
        messages.iter().filter_map(status).collect()
    }

    #[test]
    fn the_first_report_tells_everything() {
        let now = start();
        let state = NodeState { warm: vec![vec![], vec![[7; 32]]], draining: true, ..Default::default() };
        let messages = Announcer::new(now).due(now, &state, &mut 4);
        let warm = ControlMessage::Warm { slot: 1, hashes: vec![[7; 32]] };
        let status = ControlMessage::Status(Status { sequence: 5, ..Default::default() });
        assert_eq!(messages, [warm, ControlMessage::Draining, status]);
    }

    #[test]
    fn changes_are_reported_at_most_every_20_ms() {
        let (mut now, mut sequence, mut state) = (start(), 0, NodeState::default());
        let mut announcer = Announcer::new(now);
        let mut sent = 0;
        for step in 0..1000 {
            state.status.steps_total = step;
            announcer.note_change();
            sent += statuses(&announcer.due(now, &state, &mut sequence)).len();
            now += MS;
        }
        assert_eq!(sent, 50);
    }

    #[test]
    fn a_change_within_20_ms_is_reported_when_they_are_over() {
        let (now, mut sequence, mut state) = (start(), 0, NodeState::default());
        let mut announcer = Announcer::new(now);
        announcer.due(now, &state, &mut sequence);
        state.status.slots_used = 1;
        announcer.note_change();
        assert!(announcer.due(now + MS, &state, &mut sequence).is_empty());
        assert_eq!(announcer.next_deadline(), now + 20 * MS);
        assert_eq!(statuses(&announcer.due(now + 20 * MS, &state, &mut sequence)), [2]);
    }

    #[test]
    fn an_unchanged_state_is_confirmed_every_250_ms() {
        let (now, mut sequence, state) = (start(), 0, NodeState::default());
        let mut announcer = Announcer::new(now);
        announcer.due(now, &state, &mut sequence);
        assert_eq!(announcer.next_deadline(), now + 250 * MS);
        assert!(announcer.due(now + 249 * MS, &state, &mut sequence).is_empty());
        assert_eq!(statuses(&announcer.due(now + 250 * MS, &state, &mut sequence)), [2]);
    }

    #[test]
    fn only_slots_that_changed_are_told_again() {
        let (now, mut sequence) = (start(), 0);
        let mut state = NodeState { warm: vec![vec![[1; 32]], vec![[2; 32]]], ..Default::default() };
        let mut announcer = Announcer::new(now);
        announcer.due(now, &state, &mut sequence);
        state.warm = vec![vec![[1; 32]]];
        announcer.note_change();
        let messages = announcer.due(now + 20 * MS, &state, &mut sequence);
        assert_eq!(messages, [ControlMessage::Warm { slot: 1, hashes: vec![] }]);
    }

    #[test]
    fn a_chain_too_long_for_one_message_is_told_as_a_prefix() {
        let now = start();
        let state = NodeState { warm: vec![vec![[1; 32]; 100_000]], ..Default::default() };
        for message in Announcer::new(now).due(now, &state, &mut 0) {
            assert!(message.encode().len() <= ControlMessage::BYTES_MAX);
        }
    }
}
