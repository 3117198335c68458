use std::fmt::Write;

use kv_block::ManifestDigest;
use proptest::prelude::*;

use super::*;
use crate::testing::{STALL, at};

const DIGEST: ManifestDigest = ManifestDigest([7; 32]);

/// Blocks 1 and 2 are wanted, with credit for one and a half.
fn sender() -> Sender {
    let plan = SenderPlan {
        first_block: 1,
        block_count: 3,
        token_count: 10,
        digest: DIGEST,
        credit_bytes: 150,
        stall: STALL,
    };
    Sender::new(at(0), plan)
}

fn encoded(index: usize) -> SenderEvent {
    SenderEvent::BlockEncoded { index, bytes: 100 }
}

fn complete() -> SenderAction {
    SenderAction::SendComplete { block_count: 2, token_count: 10, digest: DIGEST }
}

fn drain(sender: &mut Sender) -> Vec<SenderAction> {
    sender.check_invariants();
    std::iter::from_fn(|| sender.poll_action()).collect()
}

fn handle(sender: &mut Sender, millis: u64, event: SenderEvent) -> Vec<SenderAction> {
    sender.handle(at(millis), event).unwrap();
    drain(sender)
}

fn after(events: &[SenderEvent]) -> Sender {
    let mut sender = sender();
    for event in events {
        handle(&mut sender, 0, event.clone());
    }
    sender
}

fn computed() -> Vec<SenderEvent> {
    vec![SenderEvent::ComputeStarted, encoded(1), encoded(2), SenderEvent::ComputeFinished]
}

fn awaiting() -> Sender {
    let mut events = computed();
    events.extend([
        SenderEvent::CreditReceived { bytes: 50 },
        SenderEvent::BlockSent { index: 1 },
        SenderEvent::BlockSent { index: 2 },
    ]);
    after(&events)
}

fn situations() -> Vec<(&'static str, Sender)> {
    let started = SenderEvent::ComputeStarted;
    let mut credit = computed();
    credit.push(SenderEvent::CreditReceived { bytes: 50 });
    credit.push(SenderEvent::BlockSent { index: 2 });
    vec![
        ("Queued", sender()),
        ("Computing, nothing encoded", after(std::slice::from_ref(&started))),
        ("Computing, one block under way", after(&[started.clone(), encoded(1)])),
        ("Computing, one under way and one waiting", after(&[started, encoded(1), encoded(2)])),
        ("Draining, one under way and one waiting", after(&computed())),
        ("Draining, last block under way", after(&credit)),
        ("AwaitingInstall", awaiting()),
        ("Ended", after(&[SenderEvent::CancelReceived])),
    ]
}

fn inputs() -> Vec<(&'static str, u64, SenderEvent)> {
    vec![
        ("ComputeStarted", 10, SenderEvent::ComputeStarted),
        ("BlockEncoded 1", 10, encoded(1)),
        ("BlockEncoded 2", 10, encoded(2)),
        ("BlockEncoded 3", 10, encoded(3)),
        ("ComputeFinished", 10, SenderEvent::ComputeFinished),
        ("ComputeFailed", 10, SenderEvent::ComputeFailed),
        ("BlockSent 1", 10, SenderEvent::BlockSent { index: 1 }),
        ("BlockSent 2", 10, SenderEvent::BlockSent { index: 2 }),
        ("CreditReceived", 10, SenderEvent::CreditReceived { bytes: 50 }),
        ("InstalledReceived", 10, SenderEvent::InstalledReceived),
        ("CancelReceived", 10, SenderEvent::CancelReceived),
        ("CancelRequested", 10, SenderEvent::CancelRequested),
        ("PeerLost", 10, SenderEvent::PeerLost),
        ("DeadlinePassed early", 10, SenderEvent::DeadlinePassed),
        ("DeadlinePassed", 10_000_000, SenderEvent::DeadlinePassed),
    ]
}

#[test]
fn every_event_in_every_state() {
    let mut text = String::new();
    for row in 0..situations().len() {
        writeln!(text, "{}", situations()[row].0).unwrap();
        for (name, millis, event) in inputs() {
            let (_, mut sender) = situations().swap_remove(row);
            let before = format!("{sender:?}");
            let note = match sender.handle(at(millis), event) {
                Ok(()) => String::new(),
                Err(error) => {
                    assert_eq!(before, format!("{sender:?}"), "a refused event changes nothing");
                    format!(" error: {error}")
                }
            };
            let state = sender.state();
            writeln!(text, "  {name:20} → {state:?}{note} {:?}", drain(&mut sender)).unwrap();
        }
    }
    insta::assert_snapshot!(text);
}

#[test]
fn blocks_wait_for_credit_and_go_out_in_order() {
    let mut sender = after(&[SenderEvent::ComputeStarted]);
    assert_eq!(handle(&mut sender, 0, encoded(1)), [SenderAction::SendBlock { index: 1 }]);
    assert_eq!(handle(&mut sender, 0, encoded(2)), []);
    assert_eq!(handle(&mut sender, 0, SenderEvent::CreditReceived { bytes: 49 }), []);
    let actions = handle(&mut sender, 0, SenderEvent::CreditReceived { bytes: 1 });
    assert_eq!(actions, [SenderAction::SendBlock { index: 2 }]);
}

#[test]
fn the_manifest_follows_the_last_block() {
    let mut sender = after(&computed());
    handle(&mut sender, 0, SenderEvent::CreditReceived { bytes: 50 });
    let freed = SenderAction::ReleaseStaged { bytes: 100 };
    assert_eq!(handle(&mut sender, 0, SenderEvent::BlockSent { index: 2 }), std::slice::from_ref(&freed));
    assert_eq!(handle(&mut sender, 0, SenderEvent::BlockSent { index: 1 }), [freed, complete()]);
    let actions = handle(&mut sender, 0, SenderEvent::InstalledReceived);
    assert_eq!(actions, [SenderAction::End(SenderOutcome::Installed)]);
}

#[test]
fn a_handoff_without_blocks_sends_the_manifest_alone() {
    let plan = SenderPlan { first_block: 3, ..sender().plan };
    let mut sender = Sender::new(at(0), plan);
    handle(&mut sender, 0, SenderEvent::ComputeStarted);
    let actions = handle(&mut sender, 0, SenderEvent::ComputeFinished);
    assert_eq!(actions, [SenderAction::SendComplete { block_count: 0, token_count: 10, digest: DIGEST }]);
}

#[test]
fn computing_has_no_deadline_but_waiting_for_the_peer_has() {
    let mut sender = after(&[SenderEvent::ComputeStarted]);
    assert_eq!(sender.next_deadline(), None);
    handle(&mut sender, 50_000, encoded(1));
    assert_eq!(sender.next_deadline(), Some(at(50_000) + STALL), "counted from when the wait began");
    handle(&mut sender, 50_100, SenderEvent::BlockSent { index: 1 });
    assert_eq!(sender.next_deadline(), None);
    handle(&mut sender, 60_000, encoded(2));
    handle(&mut sender, 61_000, SenderEvent::CreditReceived { bytes: 1 });
    assert_eq!(sender.next_deadline(), Some(at(61_000) + STALL), "a word of the peer renews it");
    let actions = handle(&mut sender, 64_000, SenderEvent::DeadlinePassed);
    assert_eq!(
        actions,
        [
            SenderAction::StopComputing,
            SenderAction::SendCancel { reason: "decode node gave no credit in time" },
            SenderAction::ReleaseStaged { bytes: 100 },
            SenderAction::End(SenderOutcome::Stalled)
        ]
    );
}

#[test]
fn absurd_credit_is_harmless() {
    let mut sender = after(&computed());
    for _ in 0..3 {
        handle(&mut sender, 0, SenderEvent::CreditReceived { bytes: u64::MAX });
    }
    assert_eq!(sender.staged_bytes(), 200);
}

#[test]
fn late_events_after_the_end_change_nothing() {
    for (name, millis, event) in inputs() {
        let mut sender = after(&computed());
        handle(&mut sender, 0, SenderEvent::PeerLost);
        assert_eq!(handle(&mut sender, millis, event), [], "{name}");
        assert_eq!((sender.state(), sender.staged_bytes()), (SenderState::Ended, 0), "{name}");
    }
}

proptest! {
    #[test]
    fn any_events_keep_the_books_and_end_once(
        ops in proptest::collection::vec((0u64..700, prop_oneof![6 => 0..9usize, 1 => 0..15usize]), 0..60),
    ) {
        let mut sender = sender();
        let (mut now, mut staged, mut ends, mut completes) = (0, 0i128, 0, 0);
        for (wait, index) in ops.into_iter().chain([(0, 11)]) {
            now += wait;
            let event = inputs().swap_remove(index).2;
            let snapshot = format!("{sender:?}");
            let before = sender.encoded_bytes;
            if sender.handle(at(now), event).is_err() {
                prop_assert_eq!(snapshot, format!("{sender:?}"));
            }
            sender.check_invariants();
            staged += i128::from(sender.encoded_bytes - before);
            while let Some(action) = sender.poll_action() {
                prop_assert_eq!(ends, 0, "{:?} after the end", action);
                match action {
                    SenderAction::ReleaseStaged { bytes } => staged -= i128::from(bytes),
                    SenderAction::SendComplete { .. } => completes += 1,
                    SenderAction::End(_) => ends += 1,
                    _ => {}
                }
            }
            prop_assert_eq!(staged, i128::from(sender.staged_bytes()));
            prop_assert!(completes <= 1);
        }
        prop_assert_eq!((sender.state(), staged, ends), (SenderState::Ended, 0, 1));
    }
}
