//! One handoff, from the accepted request to its end.
//!
//! ```text
//!  decode node ──Credit, Installed, Cancel──▶ ┌──────────────┐
//!  engine thread ──rows──▶ encoder ──blocks──▶│ handoff task │──Progress, Complete──▶ decode node
//!  frame stream ──────────written────────────▶│    Sender    │──blocks──▶ frame stream
//!  clock ──deadline, heartbeat───────────────▶└──────────────┘
//! ```
#![expect(clippy::disallowed_methods, reason = "shell: tells the state machine what time it is")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::ExportedRows;
use handoff::{Sender, SenderAction, SenderEvent, SenderOutcome, SenderPlan};
use kernels::CodecError;
use kv_transfer::{Connection, HandoffMessage, Message, MessageReceiver, MessageSender, TransferError};
use tokio::sync::watch;
use tokio::time::{Interval, MissedTickBehavior, interval_at, sleep_until, timeout};

use crate::board::{Board, HandoffGuard};
use crate::encode::{EncodedBlock, encode_chunk};
use crate::frame_stream::{FrameStream, Written};
use crate::request::Job;
use crate::work_queue::{Computed, Ticket};

/// The receiver hears of a living handoff at least this often: several times in
/// the shortest silence that it takes for a stall.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// An engine that takes longer for a chunk, and longer than a multiple of its
/// slowest recent step, hangs: its handoffs fall silent, and their receivers look elsewhere.
const ENGINE_PATIENCE: Duration = Duration::from_secs(30);
const SLOWEST_STEPS: u32 = 8;

/// A receiver that owes credit and is silent for so long is taken for stuck. A
/// dead connection shows earlier.
const STALL: Duration = Duration::from_secs(30);

/// A message of a few bytes that the peer does not take for so long: it does
/// not read its stream.
const SEND_PATIENCE: Duration = Duration::from_secs(5);

/// Everything a handoff needs to run.
pub(crate) struct Handoff {
    pub(crate) job: Arc<Job>,
    pub(crate) ticket: Ticket,
    pub(crate) guard: HandoffGuard,
    pub(crate) board: Board,
    pub(crate) connection: Connection,
    pub(crate) to_peer: MessageSender,
    pub(crate) from_peer: MessageReceiver,
    /// Becomes true when the node stops at once.
    pub(crate) stop: watch::Receiver<bool>,
}

/// Runs a handoff to its end.
pub(crate) async fn run(handoff: Handoff) -> SenderOutcome {
    let mut task = Task::new(handoff);
    loop {
        if let Some(outcome) = task.outcome {
            task.close(outcome);
            return outcome;
        }
        let input = task.next_input().await;
        task.take(input).await;
        task.perform_actions().await;
        task.guard.staged(task.sender.staged_bytes());
    }
}

struct Task {
    job: Arc<Job>,
    ticket: Ticket,
    guard: HandoffGuard,
    board: Board,
    to_peer: MessageSender,
    from_peer: MessageReceiver,
    stop: watch::Receiver<bool>,
    sender: Sender,
    frames: FrameStream,
    /// The chunk being encoded. While there is one, no further is taken: order.
    encoding: Option<Encoding>,
    encoded: BTreeMap<usize, EncodedBlock>,
    heartbeat: Interval,
    computed_tokens: usize,
    reused_tokens: usize,
    /// Nothing more comes from the engine.
    compute_over: bool,
    /// What the engine or the codec said when it gave up.
    failure: Option<String>,
    peer_lost: bool,
    outcome: Option<SenderOutcome>,
}

/// What the task waits for.
enum Input {
    Peer(Result<Option<HandoffMessage>, TransferError>),
    Computed(Option<Computed>),
    Encoded(Result<Vec<EncodedBlock>, String>),
    Written(Result<Written, TransferError>),
    Deadline,
    Heartbeat,
    Stop,
}

impl Task {
    fn new(handoff: Handoff) -> Self {
        let Handoff { job, ticket, guard, board, connection, to_peer, from_peer, stop } = handoff;
        let plan = SenderPlan {
            first_block: job.first_block,
            block_count: job.table.block_count(),
            token_count: job.table.token_count(),
            digest: job.table.digest(job.first_block),
            credit_bytes: job.credit_bytes,
            stall: STALL,
        };
        let mut heartbeat = interval_at((host::now() + HEARTBEAT).into(), HEARTBEAT);
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            job,
            ticket,
            guard,
            board,
            to_peer,
            from_peer,
            stop,
            sender: Sender::new(host::now(), plan),
            frames: FrameStream::new(connection),
            encoding: None,
            encoded: BTreeMap::new(),
            heartbeat,
            computed_tokens: 0,
            reused_tokens: 0,
            compute_over: false,
            failure: None,
            peer_lost: false,
            outcome: None,
        }
    }

    /// Cancel-safe: whatever is not chosen stays where it is.
    async fn next_input(&mut self) -> Input {
        let deadline = self.sender.next_deadline();
        tokio::select! {
            biased;
            _ = self.stop.wait_for(|stop| *stop) => Input::Stop,
            _ = self.heartbeat.tick() => Input::Heartbeat,
            message = self.from_peer.recv::<HandoffMessage>() => Input::Peer(message),
            written = self.frames.written() => Input::Written(written),
            encoded = join(&mut self.encoding) => Input::Encoded(encoded),
            computed = self.ticket.computed.recv(), if self.encoding.is_none() && !self.compute_over => {
                Input::Computed(computed)
            }
            // Last: the word that it waits for may be here already.
            () = until(deadline) => Input::Deadline,
        }
    }

    async fn take(&mut self, input: Input) {
        match input {
            Input::Peer(Ok(Some(HandoffMessage::Credit { bytes }))) => {
                self.handle(SenderEvent::CreditReceived { bytes });
            }
            Input::Peer(Ok(Some(HandoffMessage::Installed))) => self.handle(SenderEvent::InstalledReceived),
            Input::Peer(Ok(Some(HandoffMessage::Cancel { .. }))) => self.handle(SenderEvent::CancelReceived),
            Input::Peer(Ok(Some(_))) => self.violation("a message that only a prefill node sends"),
            Input::Peer(Ok(None)) => self.handle(SenderEvent::CancelReceived),
            Input::Peer(Err(TransferError::Malformed { .. } | TransferError::TooLarge { .. })) => {
                self.violation("a malformed message");
            }
            Input::Peer(Err(_)) | Input::Written(Err(_)) => self.lose_peer(),
            Input::Written(Ok(written)) => self.take_written(written),
            Input::Encoded(Ok(blocks)) => self.take_encoded(blocks),
            Input::Encoded(Err(reason)) => self.fail(reason),
            Input::Computed(computed) => self.take_computed(computed).await,
            Input::Deadline => self.handle(SenderEvent::DeadlinePassed),
            Input::Heartbeat if self.engine_moves() => self.send_progress().await,
            Input::Heartbeat => {}
            Input::Stop => self.handle(SenderEvent::CancelRequested),
        }
    }

    /// Whether the engine is idle or gets on with its chunk, of this prompt or
    /// another. A node whose engine hangs must not look alive.
    fn engine_moves(&self) -> bool {
        let (since, slowest) = self.board.work();
        since.is_none_or(|since| {
            host::now().saturating_duration_since(since) < ENGINE_PATIENCE.max(slowest * SLOWEST_STEPS)
        })
    }

    async fn take_computed(&mut self, computed: Option<Computed>) {
        match computed {
            Some(Computed::Started { reused }) => {
                self.reused_tokens = reused;
                self.handle(SenderEvent::ComputeStarted);
            }
            Some(Computed::Chunk { tokens, rows }) => {
                self.computed_tokens = tokens.max(self.reused_tokens);
                self.encoding = rows.map(|rows| encode(self.job.clone(), rows));
                self.send_progress().await;
            }
            Some(Computed::Finished) => self.handle(SenderEvent::ComputeFinished),
            Some(Computed::Failed(reason)) => self.fail(reason),
            None => self.compute_over = true,
        }
    }

    fn take_encoded(&mut self, blocks: Vec<EncodedBlock>) {
        for block in blocks {
            let (index, bytes) = (block.index, block.bytes);
            self.encoded.insert(index, block);
            self.handle(SenderEvent::BlockEncoded { index, bytes });
        }
    }

    fn take_written(&mut self, written: Written) {
        self.board.sent(written.bytes);
        self.handle(SenderEvent::BlockSent { index: written.index });
        if written.ends_chunk {
            self.ticket.chunk_sent();
        }
    }

    fn lose_peer(&mut self) {
        self.peer_lost = true;
        self.handle(SenderEvent::PeerLost);
    }

    fn fail(&mut self, reason: String) {
        self.failure = Some(reason);
        self.handle(SenderEvent::ComputeFailed);
    }

    fn violation(&mut self, what: &'static str) {
        tracing::warn!(what, "decode node broke the handoff protocol");
        self.failure = Some(format!("decode node sent {what}"));
        self.handle(SenderEvent::CancelRequested);
    }

    /// An event that the state does not allow came from a peer out of step;
    /// such a handoff ends.
    fn handle(&mut self, event: SenderEvent) {
        if let Err(error) = self.sender.handle(host::now(), event) {
            tracing::warn!(%error, "handoff out of step");
            self.failure = Some(error.to_string());
            let _ = self.sender.handle(host::now(), SenderEvent::CancelRequested);
        }
    }

    async fn perform_actions(&mut self) {
        while let Some(action) = self.sender.poll_action() {
            match action {
                SenderAction::SendBlock { index } => {
                    if let Some(block) = self.encoded.remove(&index) {
                        self.frames.send(block);
                    }
                }
                SenderAction::SendComplete { block_count, token_count, digest } => {
                    let (block_count, token_count) = (block_count as u32, token_count as u32);
                    self.send(&HandoffMessage::Complete { block_count, token_count, digest: digest.0 }).await;
                }
                SenderAction::SendCancel { reason } => {
                    let reason = match &self.failure {
                        Some(failure) => format!("{reason}: {failure}"),
                        None => reason.to_owned(),
                    };
                    // What was staged is given up before a message may wait for the peer.
                    self.release();
                    self.send(&HandoffMessage::Cancel { reason }).await;
                }
                SenderAction::StopComputing => self.ticket.stop(),
                // The blocks go with `encoded` and the frame stream; the status
                // follows `staged_bytes`.
                SenderAction::ReleaseStaged { .. } => {}
                SenderAction::End(outcome) => self.outcome = Some(outcome),
            }
        }
    }

    fn release(&mut self) {
        self.ticket.stop();
        self.encoded.clear();
        self.guard.staged(0);
    }

    async fn send_progress(&mut self) {
        let (computed_tokens, reused_tokens) = (self.computed_tokens as u32, self.reused_tokens as u32);
        self.send(&HandoffMessage::Progress { computed_tokens, reused_tokens }).await;
        // From here on: one that took long must not make the next one due at once.
        self.heartbeat.reset();
    }

    async fn send(&mut self, message: &impl Message) {
        if self.peer_lost {
            return;
        }
        match timeout(SEND_PATIENCE, self.to_peer.send(message)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) | Err(_) => self.lose_peer(),
        }
    }

    fn close(mut self, outcome: SenderOutcome) {
        if outcome == SenderOutcome::Installed {
            self.guard.completed();
        }
        if self.peer_lost {
            self.to_peer.reset();
        } else {
            self.to_peer.finish();
        }
    }
}

type Encoding = host::Blocking<Result<Vec<EncodedBlock>, CodecError>>;

fn encode(job: Arc<Job>, rows: ExportedRows) -> Encoding {
    host::blocking(move || encode_chunk(&job, &rows))
}

/// Result of the chunk being encoded; pending while there is none.
async fn join(encoding: &mut Option<Encoding>) -> Result<Vec<EncodedBlock>, String> {
    let Some(handle) = encoding else { return std::future::pending().await };
    let result = handle.await;
    *encoding = None;
    match result {
        Ok(blocks) => blocks.map_err(|error| error.to_string()),
        Err(error) => Err(format!("encoder: {error}")),
    }
}

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}
