//! One handoff's shell on the decode node: messages and frames in, the
//! [`Receiver`]'s orders out. One loop, one owner.
#![expect(clippy::disallowed_methods, reason = "a shell: it supplies the clock")]

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use engine::InstallBlob;
use handoff::{
    FrameFacts, FrameVerdict, Receiver, ReceiverAction, ReceiverEvent, ReceiverOutcome, ReceiverPlan,
};
use host::Bug;
use kernels::RowsShape;
use kv_block::{BlockTable, HandoffId, Layout, ManifestDigest};
use kv_transfer::{
    FrameHeader, FrameReader, HandoffMessage, MessageReceiver, MessageSender, PrefillRequest, TransferError,
};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::peers::{Arrivals, ArrivedStream};
use crate::stats::{Counted, Stats};

/// Messages are small beside a stream's window: one that is not taken for so
/// long never will be.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// From a deadline to the verdict, see `deadline_passed`.
const DOUBT: Duration = Duration::from_millis(50);

/// Gives the blob to the engine; resolves to whether it was installed.
pub(crate) type InstallOrder = Box<dyn FnOnce(InstallBlob) -> oneshot::Receiver<bool> + Send>;

/// Everything that one handoff needs.
pub(crate) struct HandoffJob {
    pub(crate) id: HandoffId,
    pub(crate) request: PrefillRequest,
    pub(crate) table: Arc<BlockTable>,
    pub(crate) layout: Arc<Layout>,
    pub(crate) blob: InstallBlob,
    pub(crate) first_block: usize,
    pub(crate) credit_window_bytes: u64,
    pub(crate) stall_min: Duration,
    pub(crate) install: InstallOrder,
    pub(crate) cancel: CancellationToken,
    pub(crate) stats: Arc<Stats>,
}

/// What became of it.
pub(crate) enum HandoffEnd {
    /// The engine took the rows.
    Installed {
        /// Prompt tokens that the prefill node did not compute.
        reused_tokens: usize,
    },
    /// The engine refused the rows, and goes on without them.
    InstallFailed,
    /// Nothing was installed; `blob` holds `salvaged_blocks` good blocks.
    NotDone {
        /// The rows so far.
        blob: InstallBlob,
        /// Complete and verified blocks from the start of the prompt.
        salvaged_blocks: usize,
        /// For the log and the route of the answer.
        reason: String,
    },
    /// The client left.
    Cancelled,
}

struct Handoff {
    receiver: Receiver,
    /// Blocks that were there before.
    first_block: usize,
    table: Arc<BlockTable>,
    layout: Arc<Layout>,
    request: Option<PrefillRequest>,
    messages: MessageSender,
    blob: Option<InstallBlob>,
    install: Option<InstallOrder>,
    installing: Option<oneshot::Receiver<bool>>,
    inbound: Inbound,
    waiting: VecDeque<ArrivedStream>,
    staged: Counted,
    stats: Arc<Stats>,
    reused_tokens: usize,
    began: Instant,
    /// When the prefill node had computed the last token.
    computed: Option<Instant>,
    refusal: String,
    /// The deadline that passed last, and until when words may still turn up.
    doubt: Option<(Instant, Instant)>,
    /// The peer's side of the message stream has ended, and was reported once.
    /// An ended stream is ready for ever: polled again, it would starve the rest.
    inbox_over: bool,
}

/// Runs a handoff to its end over streams that are already open.
pub(crate) async fn run(
    job: HandoffJob,
    messages: MessageSender,
    inbox: MessageReceiver,
    arrivals: Arrivals,
) -> HandoffEnd {
    let plan = ReceiverPlan {
        table: job.table.clone(),
        layout: job.layout.clone(),
        first_block: job.first_block,
        credit_window_bytes: job.credit_window_bytes,
        stall_min: job.stall_min,
    };
    let counted = job.stats.handoff();
    let handoff = Handoff {
        first_block: plan.first_block,
        receiver: Receiver::new(host::now(), plan),
        table: job.table,
        layout: job.layout,
        request: Some(job.request),
        messages,
        blob: Some(job.blob),
        install: Some(job.install),
        installing: None,
        inbound: Inbound::Idle,
        waiting: VecDeque::new(),
        staged: job.stats.staged(),
        stats: job.stats,
        reused_tokens: 0,
        began: host::now(),
        computed: None,
        refusal: String::new(),
        doubt: None,
        inbox_over: false,
    };
    let span = tracing::debug_span!("handoff", id = %job.id);
    let end = handoff.drive(inbox, arrivals, job.cancel).instrument(span).await;
    drop(counted);
    end
}

impl Handoff {
    async fn drive(
        mut self,
        mut inbox: MessageReceiver,
        mut arrivals: Arrivals,
        cancel: CancellationToken,
    ) -> HandoffEnd {
        let mut cancelled = false;
        loop {
            if let Some(outcome) = self.perform().await {
                return self.end(outcome);
            }
            self.next_frame();
            if let Some(outcome) = self.perform().await {
                return self.end(outcome);
            }
            let deadline = self.receiver.next_deadline();
            let wake = self.doubtful(deadline);
            tokio::select! {
                biased;
                () = cancel.cancelled(), if !cancelled => {
                    cancelled = true;
                    self.event(ReceiverEvent::CancelRequested);
                }
                message = inbox.recv::<HandoffMessage>(), if !self.inbox_over => self.message(message),
                installed = wait_for(&mut self.installing) => {
                    self.installing = None;
                    self.event(if installed { ReceiverEvent::InstallDone } else { ReceiverEvent::InstallFailed });
                }
                Some(stream) = arrivals.next() => self.waiting.push_back(stream),
                result = self.inbound.advance(self.blob.as_mut()) => self.inbound_moved(result),
                () = sleep_until(wake) => self.deadline_passed(deadline),
            }
        }
    }

    /// When to look at `deadline`: not before the benefit of the doubt is over.
    fn doubtful(&self, deadline: Option<Instant>) -> Option<Instant> {
        match self.doubt {
            Some((of, until)) if deadline == Some(of) => Some(until),
            _ => deadline,
        }
    }

    /// A deadline that passed while this node itself stood still proves nothing:
    /// the peer's words may lie unread in the socket. They get a moment more.
    fn deadline_passed(&mut self, deadline: Option<Instant>) {
        let Some(deadline) = deadline else { return };
        match self.doubt {
            Some((of, _)) if of == deadline => self.event(ReceiverEvent::DeadlinePassed),
            _ => self.doubt = Some((deadline, host::now() + DOUBT)),
        }
    }

    fn event(&mut self, event: ReceiverEvent) {
        if let Err(error) = self.receiver.handle(host::now(), event) {
            // Only a peer that breaks the order of messages can cause this.
            tracing::warn!(%error, "prefill node broke the handoff protocol");
            let _ = self.receiver.handle(host::now(), ReceiverEvent::PeerLost);
        }
    }

    // Messages ----------------------------------------------------------------

    fn message(&mut self, message: Result<Option<HandoffMessage>, TransferError>) {
        self.inbox_over = !matches!(message, Ok(Some(_)));
        let event = match message {
            Ok(Some(message)) => self.translate(message),
            Ok(None) => ReceiverEvent::PeerLost,
            Err(error) => {
                tracing::debug!(%error, "handoff stream ended");
                ReceiverEvent::PeerLost
            }
        };
        self.event(event);
    }

    fn translate(&mut self, message: HandoffMessage) -> ReceiverEvent {
        match message {
            HandoffMessage::Accepted { expected_start_ms, reused_tokens, .. } => {
                self.reused_tokens = reused_tokens as usize;
                ReceiverEvent::Accepted { expected_start: Duration::from_millis(expected_start_ms) }
            }
            HandoffMessage::Refused { reason, message } => {
                self.refusal = format!("{reason:?}: {message}");
                ReceiverEvent::Refused
            }
            HandoffMessage::Progress { computed_tokens, reused_tokens } => {
                self.reused_tokens = reused_tokens as usize;
                if computed_tokens as usize >= self.table.token_count() {
                    self.computed.get_or_insert_with(host::now);
                }
                // Reused tokens take no time: they must not look like progress.
                ReceiverEvent::Progress {
                    computed_tokens: computed_tokens.saturating_sub(reused_tokens) as usize,
                }
            }
            HandoffMessage::Complete { block_count, token_count, digest } => ReceiverEvent::Completed {
                block_count: block_count as usize,
                token_count: token_count as usize,
                digest: ManifestDigest(digest),
            },
            HandoffMessage::Cancel { reason } => {
                self.refusal = reason;
                ReceiverEvent::CancelReceived
            }
            // Only this side sends these.
            HandoffMessage::Credit { .. } | HandoffMessage::Installed => ReceiverEvent::PeerLost,
        }
    }

    // Frames ------------------------------------------------------------------

    /// Turns to the next stream when none is being read.
    fn next_frame(&mut self) {
        if let Inbound::Idle = self.inbound
            && self.blob.is_some()
            && let Some(ArrivedStream { header, reader }) = self.waiting.pop_front()
        {
            self.judge(header, reader);
        }
    }

    fn judge(&mut self, header: FrameHeader, reader: FrameReader) {
        let facts = FrameFacts {
            block_index: header.block_index as usize,
            block_hash: header.block_hash,
            part: header.part,
            raw_bytes: u64::from(header.raw_bytes),
            encoded_bytes: u64::from(header.encoded_bytes),
        };
        self.inbound = match self.receiver.admit_frame(host::now(), &facts) {
            FrameVerdict::Store => match kernels::codec(header.codec) {
                Ok(codec) if codec.is_identity() && header.encoded_bytes != header.raw_bytes => {
                    tracing::warn!(codec = codec.name(), "frame length does not match its codec");
                    self.event(ReceiverEvent::PeerLost);
                    Inbound::Idle
                }
                Ok(codec) => {
                    let tokens = self.table.tokens_of(facts.block_index);
                    let scratch =
                        if codec.is_identity() { Vec::new() } else { vec![0; header.encoded_bytes as usize] };
                    Inbound::Payload(Payload { reader, header, codec: Some(codec), tokens, scratch })
                }
                Err(error) => {
                    tracing::warn!(%error, "frame with a codec that was not offered");
                    self.event(ReceiverEvent::PeerLost);
                    Inbound::Idle
                }
            },
            FrameVerdict::Drop => {
                self.stats.late_frames.fetch_add(1, Relaxed);
                Inbound::Payload(Payload { reader, header, codec: None, tokens: 0..0, scratch: Vec::new() })
            }
            FrameVerdict::Violation(what) => {
                tracing::warn!(what, "prefill node sent a frame that was not agreed");
                reader.stop();
                Inbound::Idle
            }
        };
    }

    fn inbound_moved(&mut self, result: Result<Moved, TransferError>) {
        match result {
            Ok(Moved::PayloadRead) => self.payload_read(),
            Ok(Moved::Header(header)) => {
                if let Inbound::Header(reader) = std::mem::replace(&mut self.inbound, Inbound::Idle) {
                    self.judge(header, reader);
                }
            }
            Ok(Moved::StreamDone) => self.inbound = Inbound::Idle,
            Err(error) => {
                tracing::debug!(%error, "frame stream ended early");
                self.inbound = Inbound::Idle;
                self.event(ReceiverEvent::PeerLost);
            }
        }
    }

    fn payload_read(&mut self) {
        let Inbound::Payload(payload) = std::mem::replace(&mut self.inbound, Inbound::Idle) else { return };
        self.stats.transfer_bytes.fetch_add(u64::from(payload.header.encoded_bytes), Relaxed);
        if payload.codec.is_some() {
            let intact = self.blob.as_mut().is_some_and(|blob| payload.finish(&self.layout, blob));
            self.event(ReceiverEvent::FrameStored {
                block_index: payload.header.block_index as usize,
                part: payload.header.part,
                encoded_bytes: u64::from(payload.header.encoded_bytes),
                intact,
            });
            self.staged.set(self.receiver.staged_bytes() as i64);
        }
        self.inbound = Inbound::Header(payload.reader);
    }

    // Orders ------------------------------------------------------------------

    async fn perform(&mut self) -> Option<ReceiverOutcome> {
        while let Some(action) = self.receiver.poll_action() {
            let sent = match action {
                ReceiverAction::SendRequest { credit_bytes } => self.send_request(credit_bytes).await,
                ReceiverAction::SendCredit { bytes } => self.send(HandoffMessage::Credit { bytes }).await,
                ReceiverAction::SendInstalled => self.send(HandoffMessage::Installed).await,
                ReceiverAction::SendCancel { reason } => {
                    self.send(HandoffMessage::Cancel { reason: reason.to_owned() }).await
                }
                ReceiverAction::Install => {
                    if let (Some(blob), Some(install)) = (self.blob.take(), self.install.take()) {
                        self.installing = Some(install(blob));
                    }
                    Ok(())
                }
                ReceiverAction::ReleaseStaged { .. } if host::has(Bug::StagingKept) => Ok(()),
                ReceiverAction::ReleaseStaged { .. } => {
                    self.staged.set(self.receiver.staged_bytes() as i64);
                    Ok(())
                }
                ReceiverAction::End(outcome) => return Some(outcome),
            };
            if let Err(error) = sent {
                tracing::debug!(%error, "handoff message not sent");
                self.event(ReceiverEvent::PeerLost);
            }
        }
        None
    }

    async fn send_request(&mut self, credit_bytes: u64) -> Result<(), TransferError> {
        match self.request.take() {
            Some(request) => within(self.messages.send(&PrefillRequest { credit_bytes, ..request })).await,
            None => Ok(()),
        }
    }

    async fn send(&mut self, message: HandoffMessage) -> Result<(), TransferError> {
        within(self.messages.send(&message)).await
    }

    fn end(self, outcome: ReceiverOutcome) -> HandoffEnd {
        self.messages.finish();
        match outcome {
            ReceiverOutcome::Installed => {
                self.stats.handoffs_completed.fetch_add(1, Relaxed);
                let micros = |since: Instant| host::now().saturating_duration_since(since).as_micros() as u64;
                self.stats.handoff_micros.fetch_add(micros(self.began), Relaxed);
                let tail = self.computed.map_or(0, micros);
                self.stats.handoff_tail_micros.fetch_add(tail, Relaxed);
                return HandoffEnd::Installed { reused_tokens: self.reused_tokens };
            }
            ReceiverOutcome::Cancelled => return HandoffEnd::Cancelled,
            _ => {}
        }
        self.stats.handoffs_failed.fetch_add(1, Relaxed);
        if host::has(Bug::StagingKept) {
            std::mem::forget(self.staged);
        }
        let (salvaged_blocks, reason) = match outcome {
            ReceiverOutcome::Broken { salvaged_blocks, reason } if self.refusal.is_empty() => {
                (salvaged_blocks, reason.to_owned())
            }
            ReceiverOutcome::Broken { salvaged_blocks, reason } => {
                (salvaged_blocks, format!("{reason} ({})", self.refusal))
            }
            _ => (self.first_block, self.refusal),
        };
        let salvaged_blocks = match host::has(Bug::SalvageTooMuch) {
            true => (salvaged_blocks + 1).min(self.table.block_count()),
            false => salvaged_blocks,
        };
        match self.blob {
            Some(blob) => HandoffEnd::NotDone { blob, salvaged_blocks, reason },
            None => HandoffEnd::InstallFailed,
        }
    }
}

// Reading one stream ----------------------------------------------------------

enum Inbound {
    Idle,
    Header(FrameReader),
    Payload(Payload),
}

struct Payload {
    reader: FrameReader,
    header: FrameHeader,
    /// `None`: the payload is not wanted.
    codec: Option<&'static dyn kernels::Codec>,
    tokens: Range<usize>,
    /// Where an encoded payload is collected; empty if it goes straight into place.
    scratch: Vec<u8>,
}

enum Moved {
    PayloadRead,
    Header(FrameHeader),
    StreamDone,
}

impl Inbound {
    /// Reads on; can be dropped at any await without losing bytes.
    async fn advance(&mut self, blob: Option<&mut InstallBlob>) -> Result<Moved, TransferError> {
        match self {
            Self::Idle => std::future::pending().await,
            Self::Header(reader) => Ok(match reader.next_header().await? {
                Some(header) => Moved::Header(header),
                None => Moved::StreamDone,
            }),
            Self::Payload(payload) => match blob {
                Some(blob) => payload.advance(blob).await.map(|()| Moved::PayloadRead),
                None => std::future::pending().await,
            },
        }
    }
}

impl Payload {
    async fn advance(&mut self, blob: &mut InstallBlob) -> Result<(), TransferError> {
        if self.codec.is_none() {
            return self.reader.skip_payload().await;
        }
        let straight = self.codec.is_some_and(|codec| codec.is_identity());
        let place = if straight {
            blob.rows_mut(self.header.part, self.tokens.clone()).expect("the receiver admitted these rows")
        } else {
            &mut self.scratch[..]
        };
        self.reader.read_payload(place).await
    }

    /// Decodes into place; returns whether the rows are what the sender had.
    fn finish(&self, layout: &Layout, blob: &mut InstallBlob) -> bool {
        let (Some(codec), Some(row)) = (self.codec, layout.row(self.header.part)) else { return false };
        let Some(rows) = blob.rows_mut(self.header.part, self.tokens.clone()) else { return false };
        let shape = RowsShape { row, tokens: self.tokens.len() };
        if !codec.is_identity()
            && let Err(error) = codec.decode(shape, &self.scratch, rows)
        {
            tracing::warn!(%error, codec = codec.name(), "payload cannot be decoded");
            return false;
        }
        kernels::checksum(rows) == self.header.checksum
    }
}

/// A peer that does not even read its messages is as good as gone.
async fn within(send: impl Future<Output = Result<(), TransferError>>) -> Result<(), TransferError> {
    match tokio::time::timeout(SEND_TIMEOUT, send).await {
        Ok(result) => result,
        Err(_) => Err(TransferError::Lost("peer does not read its messages".to_owned())),
    }
}

async fn wait_for(installing: &mut Option<oneshot::Receiver<bool>>) -> bool {
    match installing {
        // A sender dropped unused means that the engine is gone.
        Some(installed) => installed.await.unwrap_or(false),
        None => std::future::pending().await,
    }
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}
