use std::fmt::Write;
use std::time::Duration;

use kv_block::{BlockHash, ManifestDigest, Part, Side};
use proptest::prelude::*;

use super::*;
use crate::testing::{PARTS, at, completed, frame, receiver_plan, stored, table};

/// Ten tokens in blocks of four; block 0 is here already.
const TOKENS: usize = 10;
const WINDOW: u64 = 4096;

fn receiver() -> Receiver {
    Receiver::new(at(0), receiver_plan(TOKENS, 1, WINDOW))
}

fn accepted() -> ReceiverEvent {
    ReceiverEvent::Accepted { expected_start: Duration::ZERO }
}

fn frame_of(block: usize, part: usize) -> FrameFacts {
    frame(&table(TOKENS), block, part)
}

fn drain(receiver: &mut Receiver) -> Vec<ReceiverAction> {
    receiver.check_invariants();
    std::iter::from_fn(|| receiver.poll_action()).collect()
}

fn handle(receiver: &mut Receiver, millis: u64, event: ReceiverEvent) -> Vec<ReceiverAction> {
    receiver.handle(at(millis), event).unwrap();
    drain(receiver)
}

fn store(receiver: &mut Receiver, block: usize, part: usize) -> Vec<ReceiverAction> {
    let facts = frame_of(block, part);
    assert_eq!(receiver.admit_frame(at(0), &facts), FrameVerdict::Store);
    handle(receiver, 0, stored(&facts, true))
}

fn store_all(receiver: &mut Receiver) {
    for block in 1..3 {
        for part in 0..PARTS {
            store(receiver, block, part);
        }
    }
}

fn receiving() -> Receiver {
    let mut receiver = receiver();
    handle(&mut receiver, 0, accepted());
    receiver
}

fn installing() -> Receiver {
    let mut receiver = receiving();
    store_all(&mut receiver);
    assert_eq!(handle(&mut receiver, 0, completed(&table(TOKENS), 1)), [ReceiverAction::Install]);
    receiver
}

fn broken(salvaged_blocks: usize, reason: &'static str) -> ReceiverAction {
    ReceiverAction::End(ReceiverOutcome::Broken { salvaged_blocks, reason })
}

/// Name, and how to get there.
fn situations() -> Vec<(&'static str, Receiver)> {
    let mut partial = receiving();
    store(&mut partial, 1, 0);
    partial.admit_frame(at(0), &frame_of(1, 1));
    let mut manifest_first = receiving();
    store_all_but_last(&mut manifest_first);
    handle(&mut manifest_first, 0, completed(&table(TOKENS), 1));
    let mut everything = receiving();
    store_all(&mut everything);
    let mut peer_gone = installing();
    handle(&mut peer_gone, 0, ReceiverEvent::PeerLost);
    let mut ended = receiving();
    handle(&mut ended, 0, ReceiverEvent::CancelRequested);
    let mut all = vec![
        ("Requested", receiver()),
        ("Receiving, nothing yet", receiving()),
        ("Receiving, one frame stored and one admitted", partial),
        ("Receiving, manifest here and one frame admitted", manifest_first),
        ("Receiving, all frames stored and no manifest", everything),
        ("Installing", installing()),
        ("Installing, peer gone", peer_gone),
        ("Ended", ended),
    ];
    for (_, receiver) in &mut all {
        drain(receiver);
    }
    all
}

fn store_all_but_last(receiver: &mut Receiver) {
    for (block, part) in [(1, 0), (1, 2), (2, 0), (2, 1), (2, 2)] {
        store(receiver, block, part);
    }
    receiver.admit_frame(at(0), &frame_of(1, 1));
}

#[derive(Clone, Debug)]
enum Input {
    Event(ReceiverEvent),
    Frame(FrameFacts),
}

/// Every event, in each variant that can be judged differently.
fn inputs() -> Vec<(&'static str, u64, Input)> {
    let wrong = ReceiverEvent::Completed { block_count: 2, token_count: 10, digest: ManifestDigest([0; 32]) };
    let good = frame_of(1, 1);
    let event = Input::Event;
    vec![
        ("Accepted", 10, event(accepted())),
        ("Refused", 10, event(ReceiverEvent::Refused)),
        ("Progress", 10, event(ReceiverEvent::Progress { computed_tokens: 4 })),
        ("frame 1.1 admitted", 10, Input::Frame(good)),
        (
            "frame 1.1 of another prompt",
            10,
            Input::Frame(FrameFacts { block_hash: BlockHash([0; 32]), ..good }),
        ),
        ("FrameStored 1.1", 10, event(stored(&good, true))),
        ("FrameStored 1.1 damaged", 10, event(stored(&good, false))),
        ("Completed", 10, event(completed(&table(TOKENS), 1))),
        ("Completed wrong", 10, event(wrong)),
        ("InstallDone", 10, event(ReceiverEvent::InstallDone)),
        ("InstallFailed", 10, event(ReceiverEvent::InstallFailed)),
        ("CancelRequested", 10, event(ReceiverEvent::CancelRequested)),
        ("CancelReceived", 10, event(ReceiverEvent::CancelReceived)),
        ("PeerLost", 10, event(ReceiverEvent::PeerLost)),
        ("DeadlinePassed early", 10, event(ReceiverEvent::DeadlinePassed)),
        ("DeadlinePassed", 60_000, event(ReceiverEvent::DeadlinePassed)),
    ]
}

#[test]
fn every_event_in_every_state() {
    let mut text = String::new();
    for row in 0..situations().len() {
        writeln!(text, "{}", situations()[row].0).unwrap();
        for (name, millis, input) in inputs() {
            let (_, mut receiver) = situations().swap_remove(row);
            let before = format!("{receiver:?}");
            let note = match input {
                Input::Event(event) => match receiver.handle(at(millis), event) {
                    Ok(()) => String::new(),
                    Err(error) => {
                        assert_eq!(before, format!("{receiver:?}"), "a refused event changes nothing");
                        format!(" error: {error}")
                    }
                },
                Input::Frame(facts) => format!(" {:?}", receiver.admit_frame(at(millis), &facts)),
            };
            let state = receiver.state();
            writeln!(text, "  {name:28} → {state:?}{note} {:?}", drain(&mut receiver)).unwrap();
        }
    }
    insta::assert_snapshot!(text);
}

#[test]
fn a_whole_handoff_ends_installed_and_acknowledges_last() {
    let mut receiver = receiver();
    assert_eq!(drain(&mut receiver), [ReceiverAction::SendRequest { credit_bytes: WINDOW }]);
    handle(&mut receiver, 0, accepted());
    store_all(&mut receiver);
    let staged = receiver.staged_bytes();
    assert_eq!(staged, 6 * 28);
    handle(&mut receiver, 0, completed(&table(TOKENS), 1));
    assert_eq!(receiver.next_deadline(), None);
    assert_eq!(
        handle(&mut receiver, 0, ReceiverEvent::InstallDone),
        [
            ReceiverAction::ReleaseStaged { bytes: staged },
            ReceiverAction::SendInstalled,
            ReceiverAction::End(ReceiverOutcome::Installed)
        ]
    );
}

#[test]
fn a_handoff_without_blocks_installs_at_the_manifest() {
    let mut receiver = Receiver::new(at(0), receiver_plan(8, 2, WINDOW));
    handle(&mut receiver, 0, accepted());
    assert_eq!(handle(&mut receiver, 0, completed(&table(8), 2)), [ReceiverAction::Install]);
}

#[test]
fn a_manifest_that_is_wrong_in_any_field_breaks_the_handoff() {
    let digest = table(TOKENS).digest(1);
    for (block_count, token_count, digest) in
        [(3, 10, digest), (2, 9, digest), (2, 10, table(TOKENS).digest(0)), (usize::MAX, usize::MAX, digest)]
    {
        let mut receiver = receiving();
        store_all(&mut receiver);
        drain(&mut receiver);
        let event = ReceiverEvent::Completed { block_count, token_count, digest };
        let actions = handle(&mut receiver, 0, event);
        assert_eq!(actions.last(), Some(&broken(3, "manifest does not agree")));
    }
}

#[test]
fn broken_handoff_salvages_only_contiguous_complete_blocks() {
    for (frames, salvaged) in [(vec![(2, 0), (2, 1), (2, 2)], 1), (vec![(1, 0), (1, 1), (1, 2), (2, 0)], 2)] {
        let mut receiver = receiving();
        for (block, part) in frames {
            store(&mut receiver, block, part);
        }
        let actions = handle(&mut receiver, 0, ReceiverEvent::PeerLost);
        assert_eq!(actions.last(), Some(&broken(salvaged, "connection lost")));
    }
}

#[test]
fn refusal_after_a_frame_is_a_broken_handoff() {
    let mut receiver = receiver();
    store(&mut receiver, 1, 0);
    let actions = handle(&mut receiver, 0, ReceiverEvent::Refused);
    assert_eq!(actions, [ReceiverAction::ReleaseStaged { bytes: 64 }, broken(1, "refused after accepting")]);
}

#[test]
fn bad_headers_end_the_handoff_and_say_why() {
    let good = frame_of(1, 0);
    let no_part = Part { section: 0, layer: 9, side: Side::K };
    let cases = [
        (FrameFacts { block_index: 0, ..good }, "frame is of a block not asked for"),
        (FrameFacts { block_index: usize::MAX, ..good }, "frame is of a block not asked for"),
        (FrameFacts { block_index: 2, ..good }, "frame is of another prompt"),
        (FrameFacts { part: no_part, ..good }, "frame is of a part that the layout lacks"),
        (FrameFacts { raw_bytes: u64::MAX, ..good }, "frame has a wrong raw size"),
        (FrameFacts { encoded_bytes: 64 + 65, ..good }, "frame is longer than its rows allow"),
    ];
    for (facts, reason) in cases {
        let mut receiver = receiving();
        assert_eq!(receiver.admit_frame(at(0), &facts), FrameVerdict::Violation(reason));
        assert_eq!(drain(&mut receiver), [ReceiverAction::SendCancel { reason }, broken(1, reason)]);
        assert_eq!(receiver.admit_frame(at(0), &good), FrameVerdict::Drop);
        assert_eq!(receiver.dropped_frames(), 1);
    }
}

#[test]
fn a_frame_beyond_the_credit_ends_the_handoff() {
    let mut receiver = Receiver::new(at(0), receiver_plan(64, 0, 0));
    let Some(ReceiverAction::SendRequest { credit_bytes }) = receiver.poll_action() else { panic!() };
    assert_eq!(credit_bytes, 4 * 28 + 3 * 64, "never less than one block");
    let table = table(64);
    let mut sent = 0;
    for block in 0..16 {
        let facts = frame(&table, block, 0);
        sent += facts.encoded_bytes;
        let verdict = receiver.admit_frame(at(0), &facts);
        if sent > credit_bytes {
            assert_eq!(verdict, FrameVerdict::Violation("frame exceeds the credit"));
            return;
        }
        assert_eq!(verdict, FrameVerdict::Store);
    }
    panic!("no frame exceeded the credit");
}

#[test]
fn repeated_frames_are_dropped_counted_and_their_credit_returned() {
    let mut receiver = Receiver::new(at(0), receiver_plan(400, 0, 400));
    drain(&mut receiver);
    let facts = frame(&table(400), 0, 0);
    assert_eq!(receiver.admit_frame(at(0), &facts), FrameVerdict::Store);
    assert_eq!(receiver.admit_frame(at(0), &facts), FrameVerdict::Drop);
    assert_eq!(receiver.admit_frame(at(0), &facts), FrameVerdict::Drop);
    assert_eq!(receiver.dropped_frames(), 2);
    assert_eq!(drain(&mut receiver), [ReceiverAction::SendCredit { bytes: 128 }]);
}

#[test]
fn credit_returns_in_batches_and_at_the_end_of_a_block() {
    let mut receiver = receiving();
    assert_eq!(store(&mut receiver, 1, 0), []);
    assert_eq!(store(&mut receiver, 1, 1), []);
    assert_eq!(store(&mut receiver, 1, 2), [ReceiverAction::SendCredit { bytes: 112 }]);
    store(&mut receiver, 2, 0);
    store(&mut receiver, 2, 1);
    assert_eq!(store(&mut receiver, 2, 2), [], "nothing is left to send");
}

#[test]
fn silence_is_a_stall() {
    let mut receiver = receiving();
    for second in 1..30 {
        handle(&mut receiver, second * 1000, ReceiverEvent::Progress { computed_tokens: 0 });
    }
    handle(&mut receiver, 30_000, ReceiverEvent::Progress { computed_tokens: 4 });
    assert_eq!(receiver.next_deadline(), Some(at(34_000)), "four times the longest gap of a second");
    handle(&mut receiver, 31_000, ReceiverEvent::Progress { computed_tokens: 4 });
    assert_eq!(receiver.next_deadline(), Some(at(35_000)), "any word is a sign of life");
    assert_eq!(handle(&mut receiver, 34_999, ReceiverEvent::DeadlinePassed), []);
    let actions = handle(&mut receiver, 35_000, ReceiverEvent::DeadlinePassed);
    assert_eq!(actions, [ReceiverAction::SendCancel { reason: "stalled" }, broken(1, "stalled")]);
}

#[test]
fn words_without_work_are_a_stall_in_the_end() {
    let mut receiver = receiving();
    handle(&mut receiver, 1000, ReceiverEvent::Progress { computed_tokens: 4 });
    for second in 2..=640 {
        handle(&mut receiver, second * 1000, ReceiverEvent::Progress { computed_tokens: 4 });
    }
    assert_eq!(receiver.next_deadline(), Some(at(641_000)), "320 shortest stalls after the last growth");
    handle(&mut receiver, 640_500, ReceiverEvent::Progress { computed_tokens: 8 });
    assert_eq!(receiver.next_deadline(), Some(at(644_500)), "growth starts it anew");
}

#[test]
fn a_hang_in_the_first_chunk_is_not_a_queue_without_end() {
    for (expected_start, patience_ms) in [(0, 640_000), (100, 1_040_000), (u64::MAX, 4 * 3_600_000 + 640_000)]
    {
        let mut receiver = receiver();
        let expected_start = Duration::from_secs(expected_start);
        handle(&mut receiver, 0, ReceiverEvent::Accepted { expected_start });
        let mut now = 0;
        while receiver.state() == ReceiverState::Receiving {
            now += 1000;
            receiver.handle(at(now), ReceiverEvent::Progress { computed_tokens: 0 }).unwrap();
            receiver.handle(at(now), ReceiverEvent::DeadlinePassed).unwrap();
        }
        assert_eq!(now, patience_ms);
    }
}

#[test]
fn a_slow_drip_cannot_stretch_the_deadline_without_bound() {
    let mut receiver = receiving();
    for token in 1..=10 {
        let now = receiver.next_deadline().unwrap() - Duration::from_millis(1);
        receiver.handle(now, ReceiverEvent::Progress { computed_tokens: token }).unwrap();
        assert!(receiver.next_deadline().unwrap() - now <= crate::testing::STALL * 16);
    }
}

#[test]
fn complete_rows_are_installed_although_the_peer_is_gone() {
    let mut receiver = installing();
    assert_eq!(handle(&mut receiver, 0, ReceiverEvent::PeerLost), []);
    let actions = handle(&mut receiver, 0, ReceiverEvent::InstallDone);
    assert_eq!(
        actions,
        [ReceiverAction::ReleaseStaged { bytes: 168 }, ReceiverAction::End(ReceiverOutcome::Installed)]
    );
}

#[test]
fn late_events_after_the_end_change_nothing() {
    for (name, millis, input) in inputs() {
        let mut receiver = installing();
        handle(&mut receiver, 0, ReceiverEvent::CancelRequested);
        match input {
            Input::Event(event) => assert_eq!(handle(&mut receiver, millis, event), [], "{name}"),
            Input::Frame(facts) => {
                assert_eq!(receiver.admit_frame(at(millis), &facts), FrameVerdict::Drop, "{name}");
            }
        }
        assert_eq!(receiver.state(), ReceiverState::Ended);
    }
}

#[derive(Clone, Debug)]
enum Op {
    Admit(usize, usize),
    Store(usize, usize, bool),
    Input(usize),
}

fn ops() -> impl Strategy<Value = Vec<(u64, Op)>> {
    let op = prop_oneof![
        12 => (1..3usize, 0..PARTS).prop_map(|(block, part)| Op::Admit(block, part)),
        12 => (1..3usize, 0..PARTS).prop_map(|(block, part)| Op::Store(block, part, true)),
        1 => (0..3usize, 0..PARTS).prop_map(|(block, part)| Op::Store(block, part, false)),
        4 => prop_oneof![Just(0usize), Just(2), Just(7), Just(9)].prop_map(Op::Input),
        1 => (0..16usize).prop_map(Op::Input),
    ];
    proptest::collection::vec((0u64..700, op), 0..90)
}

proptest! {
    #[test]
    fn any_events_keep_the_books_and_end_once(ops in ops()) {
        let mut receiver = receiver();
        let (mut now, mut staged, mut ends) = (0, 0i128, 0);
        let cancel = (0, Op::Input(11));
        for (wait, op) in ops.into_iter().chain([cancel]) {
            now += wait;
            let before = receiver.staged_bytes();
            let event = match op {
                Op::Admit(block, part) => { receiver.admit_frame(at(now), &frame_of(block, part)); None }
                Op::Store(block, part, intact) => Some(stored(&frame_of(block, part), intact)),
                Op::Input(index) => match inputs().swap_remove(index).2 {
                    Input::Event(event) => Some(event),
                    Input::Frame(facts) => { receiver.admit_frame(at(now), &facts); None }
                },
            };
            let snapshot = format!("{receiver:?}");
            if let Some(event) = event && receiver.handle(at(now), event).is_err() {
                prop_assert_eq!(snapshot, format!("{receiver:?}"));
            }
            receiver.check_invariants();
            staged += i128::from(receiver.staged_bytes().saturating_sub(before));
            while let Some(action) = receiver.poll_action() {
                prop_assert_eq!(ends, 0, "{:?} after the end", action);
                match action {
                    ReceiverAction::ReleaseStaged { bytes } => staged -= i128::from(bytes),
                    ReceiverAction::End(_) => ends += 1,
                    _ => {}
                }
            }
            prop_assert_eq!(staged, i128::from(receiver.staged_bytes()));
        }
        prop_assert_eq!((receiver.state(), staged, ends), (ReceiverState::Ended, 0, 1));
    }
}
