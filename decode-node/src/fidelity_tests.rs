//! Real models through the real wire. What a decode node installs is what the
//! prefill node computed, bit for bit, and at equal cells and batch shapes the
//! model goes on bit for bit the same. Another batch shape alone changes the
//! logits a little; how much is measured with F16 weights.
//!
//! Two prompts per model by default; `SEGUE_FIDELITY_PROMPTS=20` runs the
//! lengths 600 to 6,000 and prints one row each (`--nocapture`).
#![allow(clippy::disallowed_methods, reason = "tests start tasks")]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use engine::llama::WeightType;
use engine::{BatchItem, InstallBlob, Model, Session, SessionConfig};
use kv_block::{BlockTable, ChainSeed, HandoffId, IsolationKey, SlotId, Token};
use kv_transfer::{Endpoint, MeshAuthority, PROTOCOL_VERSION, PrefillRequest, Role, Shutdown, Tuning};
use prefill_node::PrefillConfig;
use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;

use crate::handoff_task::{self, HandoffEnd, HandoffJob};
use crate::peers::Peers;
use crate::stats::Stats;

const CHUNK: usize = 256;
const BLOCK: usize = 64;
const OTHER_CHUNK: usize = 100;
const FORCED: usize = 64;
const INSTALLED: SlotId = SlotId(0);
const LOCAL: SlotId = SlotId(1);
/// Mean divergence allowed with F16 weights, in nats. With 8-bit activations the
/// noise of another batch shape alone is some 2e-3, so only F16 is held to it.
const KL_MAX: f64 = 1e-4;

fn model_file(name: &str) -> PathBuf {
    let cache = std::env::var_os("SEGUE_CACHE").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").expect("HOME is set")).join(".cache/segue"),
        PathBuf::from,
    );
    let path = cache.join("models").join(name);
    assert!(path.exists(), "{} is missing: run `make models-test`", path.display());
    path
}

/// A copy of `name` with F16 weights, made once.
fn f16_copy(name: &str, copy: &str) -> PathBuf {
    let from = model_file(name);
    let to = from.with_file_name(copy);
    if !to.exists() {
        let partial = to.with_extension(format!("partial-{}", std::process::id()));
        engine::llama::requantize(&from, &partial, WeightType::F16, 1).unwrap();
        std::fs::rename(&partial, &to).unwrap();
    }
    to
}

/// Lengths of the prompts, evenly from 600 to 6,000 tokens, or two short ones.
fn lengths() -> Vec<usize> {
    match std::env::var("SEGUE_FIDELITY_PROMPTS").ok().and_then(|count| count.parse::<usize>().ok()) {
        Some(count) if count > 1 => (0..count).map(|index| 600 + index * 5400 / (count - 1)).collect(),
        _ => vec![600, 1111],
    }
}

/// English, Rust and Markdown from this repository, from another place each time.
fn text_tokens(model: &dyn Model, index: usize, count: usize) -> Vec<Token> {
    const TEXTS: [&str; 4] = [
        include_str!("../../LICENSE"),
        include_str!("runner.rs"),
        include_str!("../../docs/wire-format.md"),
        include_str!("request_task.rs"),
    ];
    let text: String = (0..TEXTS.len()).map(|offset| TEXTS[(index + offset) % TEXTS.len()]).collect();
    let tokens = model.vocabulary().tokenize(&text, true, false);
    assert!(tokens.len() >= count, "the texts have {} tokens, {count} wanted", tokens.len());
    tokens[..count].to_vec()
}

struct Lab {
    model: Arc<dyn Model>,
    session: Box<dyn Session>,
    peers: Peers,
    address: String,
    stats: Arc<Stats>,
}

impl Lab {
    async fn start(path: PathBuf) -> Self {
        let model = engine::llama::load(&path).unwrap();
        let config = SessionConfig { slots: 2, context_tokens: 8192, batch_tokens_max: 512, threads: 1 };
        let session = model.decode_session(&config).unwrap();
        let authority = MeshAuthority::generate();
        // A free port, found by taking one.
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap().to_string();
        drop(socket);
        let config = PrefillConfig {
            listen: address.clone(),
            block_tokens: BLOCK,
            chunk_tokens: CHUNK,
            context_tokens: 8192,
            threads: 1,
            ..PrefillConfig::default()
        };
        let credentials = authority.issue(&config.name, Role::Prefill);
        let (keep, shutdown) = watch::channel(Shutdown::Running);
        let serving = model.clone();
        tokio::spawn(async move {
            prefill_node::run(config, serving, credentials, shutdown).await.unwrap();
            drop(keep);
        });
        let credentials = authority.issue("decode-1", Role::Decode);
        let endpoint =
            Endpoint::bind("127.0.0.1:0".parse().unwrap(), &credentials, &Tuning::default()).unwrap();
        let stats = Arc::new(Stats::default());
        Self { model, session, peers: Peers::new(endpoint, stats.clone()), address, stats }
    }

    /// The KV of all tokens, fetched from the prefill node.
    async fn fetch(&self, tokens: &[Token]) -> InstallBlob {
        let template = self.session.blob_template().unwrap();
        let layout = template.layout().clone();
        let seed = ChainSeed::new(self.model.fingerprint(), layout.id(), IsolationKey::SHARED);
        let id = HandoffId(host::random_bytes());
        let (sender, received) = oneshot::channel();
        let job = HandoffJob {
            id,
            request: PrefillRequest {
                protocol: PROTOCOL_VERSION,
                handoff: id.0,
                request_id: "fidelity".to_owned(),
                fingerprint: self.model.fingerprint().0,
                layout: layout.id().0,
                isolation: IsolationKey::SHARED.0,
                block_tokens: BLOCK as u32,
                tokens: tokens.iter().map(|token| token.0).collect(),
                have_blocks: 0,
                end: tokens.len() as u32,
                codecs: vec![kernels::RAW],
                credit_bytes: 0,
            },
            table: Arc::new(BlockTable::new(seed, tokens, BLOCK)),
            layout,
            blob: template.blob(tokens.len()),
            first_block: 0,
            credit_window_bytes: 16 << 20,
            stall_min: Duration::from_secs(60),
            install: Box::new(move |blob| {
                let _ = sender.send(blob);
                let (done, answer) = oneshot::channel();
                let _ = done.send(true);
                answer
            }),
            cancel: CancellationToken::new(),
            stats: self.stats.clone(),
        };
        let connection = self.connection().await;
        let (messages, inbox) = connection.open().await.unwrap();
        let arrivals = self.peers.arrivals(id);
        assert!(matches!(
            handoff_task::run(job, messages, inbox, arrivals).await,
            HandoffEnd::Installed { reused_tokens: 0 }
        ));
        received.await.unwrap()
    }

    async fn connection(&self) -> kv_transfer::Connection {
        for _ in 0..50 {
            if let Ok(connection) = self.peers.connection(&self.address).await {
                return connection;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("the prefill node does not answer");
    }

    /// Runs one prompt both ways and holds the results equal. With
    /// `other_shape`, returns the mean divergence of the next tokens from a
    /// local run in chunks of another length.
    async fn compare(&mut self, index: usize, length: usize, other_shape: bool) -> Option<f64> {
        let text = text_tokens(self.model.as_ref(), index, length + FORCED);
        let prompt = &text[..length - 1];
        let blob = self.fetch(prompt).await;
        self.session.install(INSTALLED, &blob).unwrap();
        self.compute_locally(prompt, CHUNK);
        self.assert_same_rows(&blob, prompt.len());
        let forced = &text[length - 1..];
        let continued: Vec<_> = forced
            .iter()
            .map(|token| {
                let installed = self.logits(INSTALLED, *token);
                let local = self.logits(LOCAL, *token);
                assert!(
                    installed == local,
                    "logits differ after {length} tokens at equal cells and batch shapes"
                );
                installed
            })
            .collect();
        if !other_shape {
            return None;
        }
        self.compute_locally(prompt, OTHER_CHUNK);
        let pairs = forced.iter().zip(&continued);
        let sum: f64 = pairs.map(|(token, other)| divergence(&self.logits(LOCAL, *token), other)).sum();
        Some(sum / forced.len() as f64)
    }

    fn compute_locally(&mut self, prompt: &[Token], chunk_tokens: usize) {
        self.session.clear(LOCAL);
        for tokens in prompt.chunks(chunk_tokens) {
            self.session.step(&[BatchItem { slot: LOCAL, tokens, logits: false }]).unwrap();
        }
    }

    /// Received, installed and locally computed rows are the same bytes.
    fn assert_same_rows(&mut self, blob: &InstallBlob, count: usize) {
        let installed = self.session.export(INSTALLED, 0..count).unwrap();
        let local = self.session.export(LOCAL, 0..count).unwrap();
        for &(part, _) in self.session.layout().clone().parts() {
            let received = blob.rows(part, 0..count).unwrap();
            assert!(received == &installed.rows(part, 0..count)[..], "installed rows differ: {part}");
            assert!(received == &local.rows(part, 0..count)[..], "computed rows differ: {part}");
        }
    }

    fn logits(&mut self, slot: SlotId, token: Token) -> Vec<f32> {
        self.session.step(&[BatchItem { slot, tokens: &[token], logits: true }]).unwrap();
        self.session.logits(0).to_vec()
    }
}

/// Kullback–Leibler divergence of the softmaxes, in nats.
fn divergence(base: &[f32], other: &[f32]) -> f64 {
    let (p, q) = (log_softmax(base), log_softmax(other));
    p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let best = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum = logits.iter().map(|logit| (f64::from(*logit) - best).exp()).sum::<f64>().ln();
    logits.iter().map(|logit| f64::from(*logit) - best - sum).collect()
}

async fn check(path: PathBuf, other_shape: bool) {
    let name = path.file_stem().unwrap().to_string_lossy().into_owned();
    let mut lab = Lab::start(path).await;
    let mut means = Vec::new();
    for (index, length) in lengths().into_iter().enumerate() {
        let mean = lab.compare(index, length, other_shape).await;
        let kl = mean.map_or_else(|| "not measured".to_owned(), |mean| format!("{mean:.1e} nats"));
        println!(
            "{name}: {length} tokens, rows equal, logits bit-equal, KL to chunks of {OTHER_CHUNK}: {kl}"
        );
        means.extend(mean);
    }
    let mean = means.iter().sum::<f64>() / means.len().max(1) as f64;
    assert!(mean <= KL_MAX, "mean divergence {mean:.2e}, allowed {KL_MAX:.0e}");
}

#[tokio::test(flavor = "multi_thread")]
async fn smollm2_q8_goes_on_as_if_it_had_computed_the_prompt() {
    check(model_file("smollm2-135m-q8_0.gguf"), false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn smollm2_f16_goes_on_as_if_it_had_computed_the_prompt() {
    check(f16_copy("smollm2-135m-q4_1.gguf", "smollm2-135m-f16.gguf"), true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gemma3_with_a_sliding_window_goes_on_as_if_it_had_computed_the_prompt() {
    check(model_file("gemma3-270m-q4_k_m.gguf"), false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gemma3_f16_goes_on_as_if_it_had_computed_the_prompt() {
    check(f16_copy("gemma3-270m-q4_k_m.gguf", "gemma3-270m-f16.gguf"), true).await;
}
