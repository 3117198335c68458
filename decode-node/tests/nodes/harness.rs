//! A decode node and a prefill node over loopback, both with the fake engine;
//! the test plays the router.

use std::sync::Arc;
use std::time::Duration;

use decode_node::DecodeConfig;
use engine::Model;
use engine::fake::{FakeModel, FakeOptions};
use kv_block::Token;
use kv_transfer::{
    Connection, ControlMessage, Endpoint, Generate, Hello, MeshAuthority, MessageReceiver, MessageSender,
    PROTOCOL_VERSION, PrefillCandidate, RequestEvent, Role, Sampling, Shutdown, Status, Tuning,
};
use prefill_node::PrefillConfig;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A node as the router sees it.
pub(crate) struct Node {
    pub(crate) hello: Hello,
    pub(crate) connection: Connection,
    pub(crate) status: watch::Receiver<Status>,
    pub(crate) shutdown: watch::Sender<Shutdown>,
}

pub(crate) struct Mesh {
    pub(crate) authority: MeshAuthority,
    pub(crate) address: String,
    arrivals: mpsc::Receiver<(Hello, Connection, watch::Receiver<Status>)>,
    pub(crate) model: Arc<FakeModel>,
}

impl Mesh {
    pub(crate) async fn new(options: FakeOptions) -> Self {
        let authority = MeshAuthority::generate();
        let credentials = authority.issue("router", Role::Router);
        let endpoint =
            Endpoint::bind("127.0.0.1:0".parse().unwrap(), &credentials, &Tuning::default()).unwrap();
        let address = endpoint.local_address().to_string();
        let (sender, arrivals) = mpsc::channel(8);
        tokio::spawn(async move {
            while let Some(connection) = endpoint.accept().await {
                tokio::spawn(register(connection, sender.clone()));
            }
        });
        Self { authority, address, arrivals, model: Arc::new(FakeModel::new(options).unwrap()) }
    }

    pub(crate) async fn prefill(&mut self, model: Arc<dyn Model>) -> Node {
        let config = PrefillConfig {
            router: self.address.clone(),
            block_tokens: 16,
            chunk_tokens: 64,
            threads: 1,
            ..PrefillConfig::default()
        };
        let credentials = self.authority.issue(&config.name, Role::Prefill);
        let (shutdown, seen) = watch::channel(Shutdown::Running);
        tokio::spawn(async move { prefill_node::run(config, model, credentials, seen).await.unwrap() });
        self.arrived(shutdown).await
    }

    pub(crate) async fn decode(&mut self, change: impl FnOnce(&mut DecodeConfig)) -> Node {
        let mut config = DecodeConfig {
            router: self.address.clone(),
            block_tokens: 16,
            slots: 4,
            threads: 1,
            local_long_tokens: 256,
            stall_seconds: 3.0,
            ..DecodeConfig::default()
        };
        change(&mut config);
        let credentials = self.authority.issue(&config.name, Role::Decode);
        let (shutdown, seen) = watch::channel(Shutdown::Running);
        let model = self.model.clone();
        tokio::spawn(async move { decode_node::run(config, model, credentials, seen).await.unwrap() });
        self.arrived(shutdown).await
    }

    pub(crate) fn bytes_per_token(&self) -> u64 {
        let config = engine::SessionConfig { slots: 1, context_tokens: 64, batch_tokens_max: 64, threads: 1 };
        self.model.prefill_session(&config).unwrap().layout().bytes_per_token()
    }

    async fn arrived(&mut self, shutdown: watch::Sender<Shutdown>) -> Node {
        let (hello, connection, status) = timeout(PATIENCE, self.arrivals.recv()).await.unwrap().unwrap();
        Node { hello, connection, status, shutdown }
    }
}

async fn register(
    connection: Connection,
    sender: mpsc::Sender<(Hello, Connection, watch::Receiver<Status>)>,
) {
    let (mut replies, mut inbox) = connection.accept().await.unwrap();
    let Some(ControlMessage::Hello(hello)) = inbox.recv().await.unwrap() else { panic!("no hello") };
    replies.send(&ControlMessage::Welcome { protocol: PROTOCOL_VERSION }).await.unwrap();
    let (report, status) = watch::channel(Status::default());
    sender.send((hello, connection, status)).await.unwrap();
    while let Ok(Some(message)) = inbox.recv::<ControlMessage>().await {
        if let ControlMessage::Status(status) = message {
            let _ = report.send(status);
        }
    }
}

impl Node {
    pub(crate) fn candidate(&self) -> PrefillCandidate {
        PrefillCandidate { name: self.hello.name.clone(), address: self.hello.address.clone() }
    }

    pub(crate) async fn ask(&self, request: &Generate) -> (MessageSender, MessageReceiver) {
        let (mut sender, inbox) = self.connection.open().await.unwrap();
        sender.send(request).await.unwrap();
        (sender, inbox)
    }

    pub(crate) async fn answer(&self, request: &Generate) -> Answer {
        let (_sender, inbox) = self.ask(request).await;
        timeout(PATIENCE, Answer::read(inbox)).await.expect("an answer in time")
    }

    /// Waits until the node reports what is asked for.
    pub(crate) async fn reports(&self, what: impl FnMut(&Status) -> bool) -> Status {
        let mut status = self.status.clone();
        timeout(PATIENCE, status.wait_for(what)).await.expect("reported in time").unwrap().clone()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) started: Option<(u32, String, String, u32)>,
    pub(crate) tokens: Vec<Token>,
    pub(crate) last: Option<RequestEvent>,
}

impl Answer {
    pub(crate) async fn read(mut inbox: MessageReceiver) -> Self {
        let mut answer = Self::default();
        while let Ok(Some(event)) = inbox.recv::<RequestEvent>().await {
            match event {
                RequestEvent::Started { cached_tokens, prefilled_by, fallback_reason, installed_tokens } => {
                    answer.started = Some((cached_tokens, prefilled_by, fallback_reason, installed_tokens));
                }
                RequestEvent::Tokens(tokens) => answer.tokens.extend(tokens.into_iter().map(Token)),
                last => answer.last = Some(last),
            }
        }
        answer
    }
}

pub(crate) fn request(prompt: &[Token], prefill: Vec<PrefillCandidate>) -> Generate {
    Generate {
        request_id: "test".to_owned(),
        tokens: prompt.iter().map(|token| token.0).collect(),
        sampling: Sampling { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: 0 },
        max_tokens: 20,
        ignore_end: true,
        isolation: [0; 32],
        prefill,
        fallback_local: true,
    }
}

pub(crate) fn prompt(seed: u32, length: u32) -> Vec<Token> {
    (0..length).map(|i| Token((seed * 31 + i * 7 + i * i) % 200)).collect()
}

pub(crate) fn quick() -> FakeOptions {
    FakeOptions { end_one_in: 0, ..FakeOptions::default() }
}
