//! A prefill node on loopback and a decode node that the test plays.

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::fake::{FakeModel, FakeOptions};
use engine::{BatchItem, InstallBlob, Model, SessionConfig};
use handoff::{
    FrameFacts, FrameVerdict, Receiver, ReceiverAction, ReceiverEvent, ReceiverOutcome, ReceiverPlan,
};
use kv_block::{BlockHash, BlockTable, ChainSeed, HandoffId, IsolationKey, ManifestDigest, SlotId, Token};
use kv_transfer::{
    Connection, Endpoint, FrameHeader, FrameReader, HandoffMessage, MeshAuthority, MessageReceiver,
    MessageSender, PROTOCOL_VERSION, PrefillRequest, Role, Shutdown, Status, Tuning,
};
use tokio::sync::{mpsc, watch};

use crate::PrefillConfig;
use crate::shell::{self, EngineEnded, Node};

pub(super) const BLOCK: usize = 16;
pub(super) const CHUNK: usize = 64;
const WINDOW: u64 = 1 << 20;

pub(super) struct Mesh {
    pub(super) node: Node,
    pub(super) model: Arc<FakeModel>,
    pub(super) shutdown: watch::Sender<Shutdown>,
    pub(super) engine_ended: EngineEnded,
    address: std::net::SocketAddr,
    decode: Endpoint,
}

pub(super) fn config() -> PrefillConfig {
    PrefillConfig {
        block_tokens: BLOCK,
        chunk_tokens: CHUNK,
        threads: 1,
        staging_bytes: 0,
        ..PrefillConfig::default()
    }
}

/// So slow that the test acts while a prompt computes: a chunk takes 13 ms.
pub(super) fn slow() -> FakeOptions {
    FakeOptions { token_time: Duration::from_micros(200), ..FakeOptions::default() }
}

pub(super) fn prompt(salt: u32, length: usize) -> Vec<u32> {
    (0..length as u32).map(|index| (index * 7 + salt * 13 + index / 50 * salt) % 200).collect()
}

impl Mesh {
    pub(super) async fn start(config: PrefillConfig, options: FakeOptions) -> Self {
        let model = Arc::new(FakeModel::new(options).unwrap());
        Self::start_with(config, model.clone(), model).await
    }

    /// `model` serves; `twin` says what is right.
    pub(super) async fn start_with(
        config: PrefillConfig,
        model: Arc<dyn Model>,
        twin: Arc<FakeModel>,
    ) -> Self {
        let authority = MeshAuthority::generate();
        let (shutdown, order) = watch::channel(Shutdown::Running);
        let (node, engine_ended) = Node::start(&config, model, order).await.unwrap();
        let endpoint = shell::bind(&config, &authority.issue("p", Role::Prefill)).unwrap();
        let address = endpoint.local_address();
        tokio::spawn(shell::accept(endpoint, node.clone()));
        let credentials = authority.issue("d", Role::Decode);
        let decode =
            Endpoint::bind("127.0.0.1:0".parse().unwrap(), &credentials, &Tuning::default()).unwrap();
        Self { node, model: twin, shutdown, engine_ended, address, decode }
    }

    pub(super) fn status(&self) -> Status {
        self.node.board.subscribe().borrow().status.clone()
    }

    /// Waits until the status is as wanted.
    pub(super) async fn until(&self, what: &str, wanted: impl Fn(&Status) -> bool) {
        let mut state = self.node.board.subscribe();
        let wait = state.wait_for(|state| wanted(&state.status));
        let met = tokio::time::timeout(Duration::from_secs(20), wait).await.is_ok();
        assert!(met, "{what}: {:?}", self.status());
    }

    /// Waits until nothing is left of any handoff.
    pub(super) async fn idle(&self) {
        self.until("idle", |status| {
            status.handoffs_active == 0
                && status.staged_bytes == 0
                && status.queue_tokens == 0
                && status.slots_used == 0
                && status.requests_in_flight == 0
        })
        .await;
    }

    pub(super) fn request(&self, tokens: &[u32]) -> PrefillRequest {
        PrefillRequest {
            protocol: PROTOCOL_VERSION,
            handoff: fresh_id(),
            request_id: "test".to_owned(),
            fingerprint: self.model.fingerprint().0,
            layout: self.session(64).layout().id().0,
            isolation: IsolationKey::SHARED.0,
            block_tokens: BLOCK as u32,
            tokens: tokens.to_vec(),
            have_blocks: 0,
            end: tokens.len() as u32 - 1,
            codecs: vec![kernels::RAW],
            credit_bytes: WINDOW,
        }
    }

    /// Opens a handoff on a connection of its own and sends the request.
    pub(super) async fn open(&self, request: PrefillRequest) -> Client {
        let connection = self.decode.connect(self.address, Role::Prefill).await.unwrap();
        let (mut to_node, from_node) = connection.open().await.unwrap();
        to_node.send(&request).await.unwrap();
        Client { request, connection, to_node, from_node }
    }

    /// A whole handoff, checked against rows computed directly.
    pub(super) async fn run(&self, request: PrefillRequest) -> Received {
        let received = self.open(request.clone()).await.receive(self).await;
        assert_eq!(received.outcome, ReceiverOutcome::Installed);
        self.check_rows(&request, &received.blob);
        received
    }

    fn session(&self, context_tokens: usize) -> Box<dyn engine::Session> {
        let config = SessionConfig { slots: 1, context_tokens, batch_tokens_max: context_tokens, threads: 1 };
        self.model.prefill_session(&config).unwrap()
    }

    fn check_rows(&self, request: &PrefillRequest, blob: &InstallBlob) {
        let (end, start) = (request.end as usize, request.have_blocks as usize * BLOCK);
        let tokens: Vec<Token> = request.tokens[..end].iter().copied().map(Token).collect();
        let mut session = self.session(end.max(64));
        session.step(&[BatchItem { slot: SlotId(0), tokens: &tokens, logits: false }]).unwrap();
        let expected = session.export(SlotId(0), start..end).unwrap();
        for &(part, _) in session.layout().clone().parts() {
            let got = blob.rows(part, start..end).unwrap();
            assert!(got == &expected.rows(part, start..end)[..], "rows of {part} differ");
        }
    }
}

pub(super) struct Client {
    request: PrefillRequest,
    connection: Connection,
    pub(super) to_node: MessageSender,
    pub(super) from_node: MessageReceiver,
}

pub(super) struct Received {
    pub(super) outcome: ReceiverOutcome,
    pub(super) blob: InstallBlob,
    /// As the last `Progress` states it.
    pub(super) reused_tokens: u32,
    pub(super) frames: usize,
    pub(super) cancel_reason: Option<String>,
}

impl Client {
    pub(super) async fn message(&mut self) -> HandoffMessage {
        let message = tokio::time::timeout(Duration::from_secs(20), self.from_node.recv()).await;
        message.expect("an answer in time").unwrap().expect("a message")
    }

    /// Waits until the node has computed so many tokens of this prompt.
    pub(super) async fn computed(&mut self, tokens: u32) {
        loop {
            if let HandoffMessage::Progress { computed_tokens, .. } = self.message().await
                && computed_tokens >= tokens
            {
                return;
            }
        }
    }

    /// Leaves without a word.
    pub(super) fn leave(self) {
        self.to_node.reset();
    }

    pub(super) async fn receive(self, mesh: &Mesh) -> Received {
        let mut side = ReceivingSide::new(&self.request, mesh);
        let (frames_sender, mut frames) = mpsc::channel(4);
        let reader = tokio::spawn(read_frames(self.connection.clone(), frames_sender));
        let (mut to_node, mut from_node) = (self.to_node, self.from_node);
        let limit = Instant::now() + Duration::from_secs(60);
        while side.outcome.is_none() {
            assert!(Instant::now() < limit, "handoff takes too long");
            tokio::select! {
                message = from_node.recv() => side.take_message(message.unwrap().expect("a message")),
                Some((header, payload)) = frames.recv() => side.take_frame(&header, &payload),
            }
            side.perform(&mut to_node).await;
        }
        to_node.finish();
        // Leaving at once would close the connection before the last word is out.
        while let Ok(Some(_)) = from_node.recv::<HandoffMessage>().await {}
        reader.abort();
        side.received()
    }
}

/// Owns the state machine of the decode node.
struct ReceivingSide {
    receiver: Receiver,
    blob: InstallBlob,
    table: Arc<BlockTable>,
    outcome: Option<ReceiverOutcome>,
    reused_tokens: u32,
    frames: usize,
    cancel_reason: Option<String>,
}

impl ReceivingSide {
    fn new(request: &PrefillRequest, mesh: &Mesh) -> Self {
        let end = request.end as usize;
        let session = mesh.session(end.max(64));
        let template = session.blob_template().unwrap();
        let layout = template.layout().clone();
        let tokens: Vec<Token> = request.tokens[..end].iter().copied().map(Token).collect();
        let seed = ChainSeed::new(mesh.model.fingerprint(), layout.id(), IsolationKey(request.isolation));
        let table = Arc::new(BlockTable::new(seed, &tokens, BLOCK));
        let plan = ReceiverPlan {
            table: table.clone(),
            layout,
            first_block: request.have_blocks as usize,
            credit_window_bytes: request.credit_bytes,
            stall_min: Duration::from_secs(30),
        };
        Self {
            receiver: Receiver::new(Instant::now(), plan),
            blob: template.blob(end),
            table,
            outcome: None,
            reused_tokens: 0,
            frames: 0,
            cancel_reason: None,
        }
    }

    fn take_message(&mut self, message: HandoffMessage) {
        let event = match message {
            HandoffMessage::Accepted { expected_start_ms, .. } => {
                ReceiverEvent::Accepted { expected_start: Duration::from_millis(expected_start_ms) }
            }
            HandoffMessage::Progress { computed_tokens, reused_tokens } => {
                self.reused_tokens = reused_tokens;
                ReceiverEvent::Progress { computed_tokens: computed_tokens as usize }
            }
            HandoffMessage::Complete { block_count, token_count, digest } => ReceiverEvent::Completed {
                block_count: block_count as usize,
                token_count: token_count as usize,
                digest: ManifestDigest(digest),
            },
            HandoffMessage::Cancel { reason } => {
                self.cancel_reason = Some(reason);
                ReceiverEvent::CancelReceived
            }
            HandoffMessage::Refused { .. } => ReceiverEvent::Refused,
            other => panic!("{other:?}"),
        };
        self.receiver.handle(Instant::now(), event).unwrap();
    }

    fn take_frame(&mut self, header: &FrameHeader, payload: &[u8]) {
        let (index, part) = (header.block_index as usize, header.part);
        let facts = FrameFacts {
            block_index: index,
            block_hash: BlockHash(header.block_hash.0),
            part,
            raw_bytes: header.raw_bytes.into(),
            encoded_bytes: header.encoded_bytes.into(),
        };
        let verdict = self.receiver.admit_frame(Instant::now(), &facts);
        assert_eq!(verdict, FrameVerdict::Store);
        let place = self.blob.rows_mut(part, self.table.tokens_of(index)).unwrap();
        place.copy_from_slice(payload);
        assert_eq!(header.codec, kernels::RAW);
        let intact = kernels::checksum(place) == header.checksum;
        assert!(intact);
        self.frames += 1;
        let encoded_bytes = facts.encoded_bytes;
        let event = ReceiverEvent::FrameStored { block_index: index, part, encoded_bytes, intact };
        self.receiver.handle(Instant::now(), event).unwrap();
    }

    async fn perform(&mut self, to_node: &mut MessageSender) {
        while let Some(action) = self.receiver.poll_action() {
            match action {
                // The test sent it already.
                ReceiverAction::SendRequest { .. } | ReceiverAction::ReleaseStaged { .. } => {}
                ReceiverAction::SendCredit { bytes } => {
                    to_node.send(&HandoffMessage::Credit { bytes }).await.unwrap();
                }
                ReceiverAction::Install => {
                    self.receiver.handle(Instant::now(), ReceiverEvent::InstallDone).unwrap();
                }
                ReceiverAction::SendInstalled => to_node.send(&HandoffMessage::Installed).await.unwrap(),
                ReceiverAction::SendCancel { reason } => {
                    to_node.send(&HandoffMessage::Cancel { reason: reason.to_owned() }).await.unwrap();
                }
                ReceiverAction::End(outcome) => self.outcome = Some(outcome),
            }
        }
    }

    fn received(self) -> Received {
        Received {
            outcome: self.outcome.expect("ended"),
            blob: self.blob,
            reused_tokens: self.reused_tokens,
            frames: self.frames,
            cancel_reason: self.cancel_reason,
        }
    }
}

async fn read_frames(connection: Connection, frames: mpsc::Sender<(FrameHeader, Vec<u8>)>) {
    while let Ok(stream) = connection.accept_frames().await {
        if read_stream(stream, &frames).await.is_none() {
            return;
        }
    }
}

async fn read_stream(mut stream: FrameReader, frames: &mpsc::Sender<(FrameHeader, Vec<u8>)>) -> Option<()> {
    while let Ok(Some(header)) = stream.next_header().await {
        let mut payload = vec![0; header.encoded_bytes as usize];
        stream.read_payload(&mut payload).await.ok()?;
        frames.send((header, payload)).await.ok()?;
    }
    Some(())
}

fn fresh_id() -> [u8; 16] {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let id = HandoffId(u128::from(NEXT.fetch_add(1, Ordering::Relaxed)).to_le_bytes());
    id.0
}
