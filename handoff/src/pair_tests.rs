//! Sender and receiver joined by a network in virtual time.
//!
//! Messages keep their order in each direction; frames travel on streams of
//! their own and overtake messages and each other. One seed decides all delays
//! and the moment of the fault.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kv_block::{BlockTable, ManifestDigest};
use proptest::prelude::*;

use crate::testing::{PARTS, STALL, epoch, frame, receiver_plan, stored, table};
use crate::*;

const STREAMS: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    ConnectionLost,
    ReceiverCancels,
    SenderCancels,
    ComputeFails,
    FrameDamaged,
    FrameRepeated,
    FrameForged,
    ManifestForged,
    /// Heartbeats go on, the engine does not.
    EngineHangs,
    /// Nothing that the receiver does leaves its node.
    ReceiverHangs,
    InstallFails,
}

const FAULTS: [Fault; 12] = [
    Fault::None,
    Fault::ConnectionLost,
    Fault::ReceiverCancels,
    Fault::SenderCancels,
    Fault::ComputeFails,
    Fault::FrameDamaged,
    Fault::FrameRepeated,
    Fault::FrameForged,
    Fault::ManifestForged,
    Fault::EngineHangs,
    Fault::ReceiverHangs,
    Fault::InstallFails,
];

/// What happens next at one of the ends.
#[derive(Clone, Debug)]
enum Delivery {
    ToSender(SenderEvent),
    ToReceiver(ReceiverEvent),
    Frame(FrameFacts),
    /// The engine of the prefill node finishes its next block.
    Compute,
    Heartbeat,
    Fault,
}

struct Random(u64);

impl Random {
    /// SplitMix64.
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

/// Both ends, and everything under way between them.
struct Network {
    random: Random,
    now: Instant,
    table: std::sync::Arc<BlockTable>,
    first_block: usize,
    /// What the codec adds to each frame, up to the most that is allowed.
    overhead_bytes: u64,
    sender: Sender,
    receiver: Receiver,
    queue: BTreeMap<(Instant, u64), Delivery>,
    sequence: u64,
    /// When the last thing on each ordered way arrives: two message
    /// directions, then the frame streams.
    ways: [Instant; 2 + STREAMS],
    fault: Fault,
    connected: bool,
    engine_runs: bool,
    computed_blocks: usize,
    stored_frames: usize,
    manifest_was_right: bool,
    sender_ends: Vec<SenderOutcome>,
    receiver_ends: Vec<ReceiverOutcome>,
    sender_released: u64,
    receiver_released: u64,
    installs_asked: u32,
}

const TO_SENDER: usize = 0;
const TO_RECEIVER: usize = 1;

impl Network {
    fn new(seed: u64, tokens: usize, first_block: usize, window: u64, fault: Fault) -> Self {
        let table = table(tokens);
        let first_block = first_block.min(table.block_count());
        let mut receiver = Receiver::new(epoch(), receiver_plan(tokens, first_block, window));
        let Some(ReceiverAction::SendRequest { credit_bytes }) = receiver.poll_action() else {
            panic!("the first action is the request");
        };
        let plan = SenderPlan {
            first_block,
            block_count: table.block_count(),
            token_count: table.token_count(),
            digest: table.digest(first_block),
            credit_bytes,
            stall: STALL,
        };
        let mut network = Self {
            random: Random(seed),
            overhead_bytes: seed % 65,
            now: epoch(),
            sender: Sender::new(epoch(), plan),
            receiver,
            table,
            first_block,
            queue: BTreeMap::new(),
            sequence: 0,
            ways: [epoch(); 2 + STREAMS],
            fault,
            connected: true,
            engine_runs: true,
            computed_blocks: first_block,
            stored_frames: 0,
            manifest_was_right: false,
            sender_ends: Vec::new(),
            receiver_ends: Vec::new(),
            sender_released: 0,
            receiver_released: 0,
            installs_asked: 0,
        };
        network.begin();
        network
    }

    fn begin(&mut self) {
        self.send(
            TO_RECEIVER,
            Delivery::ToReceiver(ReceiverEvent::Accepted { expected_start: Duration::ZERO }),
        );
        let queued = self.random.below(5000);
        self.later(queued, Delivery::ToSender(SenderEvent::ComputeStarted));
        self.later(queued + 100, Delivery::Compute);
        self.later(500, Delivery::Heartbeat);
        let moment = self.random.below(8000);
        self.later(moment, Delivery::Fault);
    }

    fn later(&mut self, millis: u64, delivery: Delivery) {
        self.put(self.now + Duration::from_millis(millis), delivery);
    }

    fn put(&mut self, at: Instant, delivery: Delivery) {
        self.sequence += 1;
        self.queue.insert((at, self.sequence), delivery);
    }

    /// A frame as the codec of this run encodes it.
    fn encode(&self, index: usize, part: usize) -> FrameFacts {
        let facts = frame(&self.table, index, part);
        FrameFacts { encoded_bytes: facts.raw_bytes + self.overhead_bytes, ..facts }
    }

    /// Over the network, in order with what went the same way before.
    fn send(&mut self, way: usize, delivery: Delivery) {
        let millis = self.random.below(60);
        let at = self.ways[way].max(self.now + Duration::from_millis(millis));
        self.ways[way] = at;
        if self.connected {
            self.put(at, delivery);
        }
    }

    fn run(&mut self) {
        for _ in 0..100_000 {
            self.perform();
            if self.sender.state() == SenderState::Ended && self.receiver.state() == ReceiverState::Ended {
                return;
            }
            self.step();
        }
        panic!("handoff does not end: {:?} {:?}", self.sender, self.receiver);
    }

    /// The next delivery or deadline, whichever comes first.
    fn step(&mut self) {
        let next = self.queue.first_key_value().map(|(key, _)| key.0);
        let deadline =
            [self.sender.next_deadline(), self.receiver.next_deadline()].into_iter().flatten().min();
        if let Some(deadline) = deadline
            && next.is_none_or(|next| deadline <= next)
        {
            self.now = self.now.max(deadline);
            self.sender.handle(self.now, SenderEvent::DeadlinePassed).unwrap();
            self.receiver.handle(self.now, ReceiverEvent::DeadlinePassed).unwrap();
            return;
        }
        let ((at, _), delivery) = self.queue.pop_first().expect("live machines wait for something");
        self.now = at;
        self.deliver(delivery);
    }

    fn deliver(&mut self, delivery: Delivery) {
        match delivery {
            Delivery::ToSender(event) => self.sender.handle(self.now, event).unwrap(),
            Delivery::ToReceiver(event) => self.receiver_event(event),
            Delivery::Frame(facts) => self.frame(&facts),
            Delivery::Compute => self.compute(),
            Delivery::Heartbeat => self.heartbeat(),
            Delivery::Fault => self.strike(),
        }
    }

    fn receiver_event(&mut self, event: ReceiverEvent) {
        let staged = self.receiver.staged_bytes();
        self.receiver.handle(self.now, event).unwrap();
        if self.receiver.staged_bytes() > staged {
            self.stored_frames += 1;
        }
    }

    fn frame(&mut self, facts: &FrameFacts) {
        if self.receiver.admit_frame(self.now, facts) == FrameVerdict::Store {
            let damaged = self.fault == Fault::FrameDamaged && self.random.below(20) == 0;
            let decode = self.random.below(5);
            self.later(decode, Delivery::ToReceiver(stored(facts, !damaged)));
        }
    }

    fn compute(&mut self) {
        if !self.engine_runs || self.sender.state() != SenderState::Computing {
            return;
        }
        if self.computed_blocks == self.table.block_count() {
            return self.sender.handle(self.now, SenderEvent::ComputeFinished).unwrap();
        }
        let index = self.computed_blocks;
        let bytes = (0..PARTS).map(|part| self.encode(index, part).encoded_bytes).sum();
        self.sender.handle(self.now, SenderEvent::BlockEncoded { index, bytes }).unwrap();
        self.computed_blocks += 1;
        let chunk = 20 + self.random.below(400);
        self.later(chunk, Delivery::Compute);
        self.heartbeat_once();
    }

    fn heartbeat(&mut self) {
        if self.sender.state() != SenderState::Ended {
            self.heartbeat_once();
            self.later(500, Delivery::Heartbeat);
        }
    }

    fn heartbeat_once(&mut self) {
        let computed_tokens = (self.computed_blocks - self.first_block) * 4;
        self.send(TO_RECEIVER, Delivery::ToReceiver(ReceiverEvent::Progress { computed_tokens }));
    }

    fn strike(&mut self) {
        match self.fault {
            Fault::ConnectionLost => self.disconnect(),
            Fault::ReceiverCancels => self.receiver_event(ReceiverEvent::CancelRequested),
            Fault::SenderCancels => self.sender.handle(self.now, SenderEvent::CancelRequested).unwrap(),
            Fault::ComputeFails => {
                if matches!(self.sender.state(), SenderState::Queued | SenderState::Computing) {
                    self.sender.handle(self.now, SenderEvent::ComputeFailed).unwrap();
                }
            }
            Fault::EngineHangs => self.engine_runs = false,
            _ => {}
        }
    }

    /// What is under way is lost; what happens within a node is not.
    fn disconnect(&mut self) {
        self.connected = false;
        self.queue.retain(|_, delivery| {
            matches!(
                delivery,
                Delivery::ToReceiver(ReceiverEvent::FrameStored { .. } | ReceiverEvent::InstallDone)
                    | Delivery::ToSender(SenderEvent::ComputeStarted)
                    | Delivery::Compute
                    | Delivery::Heartbeat
            )
        });
        let (one, other) = (self.random.below(300), self.random.below(300));
        self.later(one, Delivery::ToSender(SenderEvent::PeerLost));
        self.later(other, Delivery::ToReceiver(ReceiverEvent::PeerLost));
    }

    fn perform(&mut self) {
        self.sender.check_invariants();
        self.receiver.check_invariants();
        while let Some(action) = self.sender.poll_action() {
            assert!(self.sender_ends.is_empty(), "{action:?} after the end");
            self.perform_sender(action);
        }
        while let Some(action) = self.receiver.poll_action() {
            assert!(self.receiver_ends.is_empty(), "{action:?} after the end");
            self.perform_receiver(action);
        }
    }

    fn perform_sender(&mut self, action: SenderAction) {
        match action {
            SenderAction::SendBlock { index } => self.send_block(index),
            SenderAction::SendComplete { block_count, token_count, digest } => {
                let forged = self.fault == Fault::ManifestForged;
                let digest = if forged { ManifestDigest([9; 32]) } else { digest };
                self.manifest_was_right = !forged;
                let event = ReceiverEvent::Completed { block_count, token_count, digest };
                self.send(TO_RECEIVER, Delivery::ToReceiver(event));
            }
            SenderAction::SendCancel { .. } => {
                self.send(TO_RECEIVER, Delivery::ToReceiver(ReceiverEvent::CancelReceived));
            }
            SenderAction::StopComputing => self.engine_runs = false,
            SenderAction::ReleaseStaged { bytes } => self.sender_released += bytes,
            SenderAction::End(outcome) => self.sender_ends.push(outcome),
        }
    }

    fn send_block(&mut self, index: usize) {
        let way = 2 + self.random.below(STREAMS as u64) as usize;
        for part in 0..PARTS {
            let mut facts = self.encode(index, part);
            if self.fault == Fault::FrameForged && self.random.below(20) == 0 {
                facts.block_hash.0[0] ^= 1;
            }
            self.send(way, Delivery::Frame(facts));
            if self.fault == Fault::FrameRepeated && self.random.below(20) == 0 {
                self.send(way, Delivery::Frame(facts));
            }
        }
        let taken = self.random.below(200);
        self.later(taken, Delivery::ToSender(SenderEvent::BlockSent { index }));
    }

    fn perform_receiver(&mut self, action: ReceiverAction) {
        let message = match action {
            ReceiverAction::SendCredit { bytes } => SenderEvent::CreditReceived { bytes },
            ReceiverAction::SendInstalled => SenderEvent::InstalledReceived,
            ReceiverAction::SendCancel { .. } => SenderEvent::CancelReceived,
            ReceiverAction::SendRequest { .. } => panic!("a second request"),
            ReceiverAction::Install => return self.install(),
            ReceiverAction::ReleaseStaged { bytes } => return self.receiver_released += bytes,
            ReceiverAction::End(outcome) => return self.receiver_ends.push(outcome),
        };
        if self.fault != Fault::ReceiverHangs {
            self.send(TO_SENDER, Delivery::ToSender(message));
        }
    }

    fn install(&mut self) {
        self.installs_asked += 1;
        let frames = (self.table.block_count() - self.first_block) * PARTS;
        assert_eq!(self.stored_frames, frames, "installed before every frame was stored");
        assert!(self.manifest_was_right, "installed under a wrong manifest");
        let failed = self.fault == Fault::InstallFails;
        let event = if failed { ReceiverEvent::InstallFailed } else { ReceiverEvent::InstallDone };
        let wait = self.random.below(30);
        self.later(wait, Delivery::ToReceiver(event));
    }

    /// What must hold when both have ended, whatever happened.
    fn check_end(&mut self) {
        self.perform();
        let late: Vec<Delivery> = std::mem::take(&mut self.queue).into_values().collect();
        for delivery in late {
            self.deliver(delivery);
            self.perform();
        }
        assert_eq!((self.sender_ends.len(), self.receiver_ends.len()), (1, 1));
        assert_eq!((self.sender.staged_bytes(), self.receiver.staged_bytes()), (0, 0));
        assert!(self.installs_asked <= 1);
        let installed = self.receiver_ends[0] == ReceiverOutcome::Installed;
        assert!(!installed || self.installs_asked == 1);
        if self.sender_ends[0] == SenderOutcome::Installed {
            assert!(installed, "the sender believes in an installation that did not happen");
        }
        if let ReceiverOutcome::Broken { salvaged_blocks, .. } = self.receiver_ends[0] {
            assert!((self.first_block..=self.table.block_count()).contains(&salvaged_blocks));
            assert!((salvaged_blocks - self.first_block) * PARTS <= self.stored_frames);
        }
        self.check_outcome();
    }

    fn check_outcome(&self) {
        let (sender, receiver) = (self.sender_ends[0], self.receiver_ends[0]);
        match self.fault {
            // A repeated frame is dropped, unless it takes credit that nobody gave.
            Fault::FrameRepeated if sender == SenderOutcome::Cancelled => {
                let ReceiverOutcome::Broken { reason, .. } = receiver else { panic!("{receiver:?}") };
                assert_eq!(reason, "frame exceeds the credit");
            }
            Fault::None | Fault::FrameRepeated => {
                assert_eq!((sender, receiver), (SenderOutcome::Installed, ReceiverOutcome::Installed));
            }
            Fault::ManifestForged | Fault::InstallFails => {
                assert_ne!(receiver, ReceiverOutcome::Installed);
                assert_eq!(sender, SenderOutcome::Cancelled);
            }
            Fault::ReceiverHangs => assert_ne!(sender, SenderOutcome::Installed),
            _ => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn both_ends_always_end_and_free_everything(
        seed in any::<u64>(),
        tokens in 1usize..120,
        first_block in 0usize..6,
        window in 0u64..1500,
        fault in proptest::sample::select(&FAULTS[..]),
    ) {
        let mut network = Network::new(seed, tokens, first_block, window, fault);
        network.run();
        network.check_end();
    }
}

#[test]
fn undisturbed_handoffs_install_with_the_smallest_window() {
    for seed in 0..130 {
        let mut network = Network::new(seed, 117, 0, 0, Fault::None);
        network.run();
        network.check_end();
        let (raw, frames) = (117 * 28, 30 * PARTS as u64);
        let encoded = raw + frames * network.overhead_bytes;
        assert_eq!((network.sender_released, network.receiver_released), (encoded, raw));
    }
}

#[test]
fn a_hung_engine_is_noticed_although_heartbeats_go_on() {
    let mut network = Network::new(1, 117, 0, 1000, Fault::None);
    network.fault = Fault::EngineHangs;
    network.run();
    let ReceiverOutcome::Broken { reason, .. } = network.receiver_ends[0] else { panic!("must break") };
    assert_eq!((reason, network.sender_ends[0]), ("stalled", SenderOutcome::Cancelled));
}
