//! Inverse arrival: the short request comes after the long one.
//!
//! Per repetition and arm:
//!
//! ```text
//!  short short short │ peer stream ────────────────────────┤ │ peer stream ───────────────────────┤
//!   (idle, median)   │    offset │ long(s) ─────────────┤  │ │    offset │ as long, without longs │
//!                    │           │  offset │ short ───┤    │ │           │  offset │ short ───┤   │
//! ```
//!
//! Everything is one future that is polled, not a crowd of tasks: when Ctrl-C drops it, every open
//! request is closed with it.

#![expect(clippy::disallowed_methods, reason = "this shell reads the clock, for the date and for the seed")]

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use futures_util::future::join_all;
use serde_json::{Map, Value, json};
use tokio::sync::watch;
use tokio::time::sleep;

use crate::calibrate::{ASSUMED, Calibration};
use crate::client::{ChatRequest, Client, Control};
use crate::estimate::{Repetition, Undisturbed, check_arm, check_cold, disturbed_window, estimate, ttft_s};
use crate::record::{About, Place, Recorder};
use crate::schedule::{Arm, alternate};
use crate::timeline::{Outcome, Timeline, Window};
use crate::{prompt, report};

/// Options of `segue bench inverse-arrival`.
#[derive(Debug, Clone, clap::Args)]
pub struct InverseArrivalArgs {
    /// The server, e.g. http://127.0.0.1:8080, with or without /v1.
    #[arg(long)]
    pub url: String,
    /// Model id to ask for [default: the first of /v1/models].
    #[arg(long)]
    pub model: Option<String>,
    /// Length of a long prompt; the text is made to fit, and the server's own count is reported.
    #[arg(long, default_value_t = 4300)]
    pub long_tokens: usize,
    /// Long prompts sent at once.
    #[arg(long, default_value_t = 1)]
    pub longs: usize,
    /// Seconds from the long prompts to the short one.
    #[arg(long, default_value_t = 2.0)]
    pub offset: f64,
    /// Repetitions of every arm.
    #[arg(long, default_value_t = 6)]
    pub reps: usize,
    /// Also watch a stream that is running before the long prompts come.
    #[arg(long)]
    pub stream_peer: bool,
    /// Longest answer of that stream; it must outlast the long prompts.
    #[arg(long, default_value_t = 4096)]
    pub peer_max_tokens: u32,
    /// Longest answer to a short request.
    #[arg(long, default_value_t = 16)]
    pub short_max_tokens: u32,
    /// Longest answer to a long prompt.
    #[arg(long, default_value_t = 8)]
    pub long_max_tokens: u32,
    /// Idle short requests per repetition; their median counts.
    #[arg(long, default_value_t = 3)]
    pub idle_shorts: usize,
    /// Long prompts sent with nothing else to do, per arm, before the repetitions.
    #[arg(long, default_value_t = 1)]
    pub long_alone: usize,
    /// Arms to alternate [default: auto,local on Segue, else plain].
    #[arg(long, value_enum, value_delimiter = ',')]
    pub arms: Vec<Arm>,
    /// JSON object of fields to add to every request, e.g. '{"cache_prompt":false}' for llama-server.
    #[arg(long, value_name = "JSON")]
    pub extra_body: Option<String>,
    /// Directory for raw.jsonl, summary.json and README.md.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// A fact for the summary, e.g. --note commit=1a2b3c4; may be repeated.
    #[arg(long, value_name = "NAME=VALUE")]
    pub note: Vec<String>,
    /// Sent as a bearer token; never written anywhere.
    #[arg(long)]
    pub api_key: Option<String>,
    /// Seconds until a request is given up.
    #[arg(long, default_value_t = 600)]
    pub timeout_s: u64,
    /// Seed of the texts; the same seed again finds warm caches [default: from the clock].
    #[arg(long)]
    pub seed: Option<u64>,
}

/// Measures, prints and writes; Ctrl-C leaves what was measured.
pub async fn inverse_arrival(args: InverseArrivalArgs) -> anyhow::Result<()> {
    let extra = check(&args)?;
    let client = Client::new(&args.url, args.api_key.clone(), Duration::from_secs(args.timeout_s))?;
    let since_1970 = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
    let seed = args.seed.unwrap_or(since_1970.as_nanos() as u64);
    let model = match &args.model {
        Some(model) => model.clone(),
        None => client.first_model().await?,
    };
    let arms = choose_arms(&args.arms, is_segue(&client).await);
    let about = About::new(&args, &model, seed, since_1970.as_secs(), server_facts(&client).await)?;
    let recorder = Recorder::create(args.out.as_deref(), about, &arms)?;

    let mut run = Run { args, client, model, extra, seed, prompts: 0, words: 0, recorder };
    let interrupted = tokio::select! {
        outcome = run.measure(&arms) => { outcome?; false }
        _ = tokio::signal::ctrl_c() => true,
    };
    run.recorder.finish(interrupted)
}

fn check(args: &InverseArrivalArgs) -> anyhow::Result<Map<String, Value>> {
    ensure!(args.longs >= 1, "--longs 0: must be at least 1");
    ensure!(args.reps >= 1, "--reps 0: must be at least 1");
    ensure!(args.idle_shorts >= 1, "--idle-shorts 0: must be at least 1");
    ensure!(args.timeout_s >= 1, "--timeout-s 0: must be at least 1");
    ensure!(
        args.offset.is_finite() && (0.0..=3600.0).contains(&args.offset),
        "--offset {}: must be 0 to 3600 seconds",
        args.offset
    );
    match args.extra_body.as_deref().map(serde_json::from_str::<Value>) {
        None => Ok(Map::new()),
        Some(Ok(Value::Object(fields))) => Ok(fields),
        Some(Ok(_)) => bail!("--extra-body: must be a JSON object"),
        Some(Err(error)) => bail!("--extra-body: {error}"),
    }
}

fn choose_arms(asked: &[Arm], segue: bool) -> Vec<Arm> {
    match (asked, segue) {
        ([], true) => vec![Arm::Auto, Arm::Local],
        ([], false) => vec![Arm::Plain],
        (asked, _) => asked.to_vec(),
    }
}

async fn is_segue(client: &Client) -> bool {
    client.document("/mesh/status").await.is_some_and(|status| status["nodes"].is_array())
}

/// What the server says about its own version, for the evidence.
async fn server_facts(client: &Client) -> Value {
    json!({
        "version": client.document("/version").await,
        "llama_build": client.document("/props").await.map(|props| props["build_info"].clone()),
        "mesh": client.document("/mesh/status").await,
    })
}

struct Run {
    args: InverseArrivalArgs,
    client: Client,
    model: String,
    extra: Map<String, Value>,
    seed: u64,
    /// Texts made so far; each gets a seed of its own.
    prompts: u64,
    /// Words of a long prompt.
    words: usize,
    recorder: Recorder,
}

/// After a stream was closed by us, servers need a moment to notice.
const SETTLE: Duration = Duration::from_millis(500);

impl Run {
    async fn measure(&mut self, arms: &[Arm]) -> anyhow::Result<()> {
        println!("{}", report::heading(self.recorder.about()));
        self.calibrate(arms[0]).await?;
        for &arm in arms {
            for index in 0..self.args.long_alone {
                self.long_alone(arm, index).await;
            }
        }
        println!("{}", report::table_head());
        for (repetition, arm) in alternate(arms, self.args.reps) {
            let measured = self.repetition(arm, repetition).await;
            let result = check_arm(arm, &measured).and_then(|()| estimate(&measured));
            println!("{}", report::table_row(repetition, arm, &measured, &result));
            self.recorder.repetition(arm, &measured, result);
        }
        Ok(())
    }

    /// Two prompts of known words; what the server counts tells how long a long prompt must be. They
    /// also wake up everything that sleeps in a server that has just started.
    async fn calibrate(&mut self, arm: Arm) -> anyhow::Result<()> {
        const WORDS: [usize; 2] = [100, 600];
        let mut counts = Vec::new();
        for (index, words) in WORDS.into_iter().enumerate() {
            let seed = self.next_seed();
            let request = self.long(arm, seed, words);
            let timeline = self.client.chat(&request, None).await;
            self.recorder.request("calibration", Place { arm, repetition: None, index }, &timeline);
            if timeline.outcome != Outcome::Completed {
                bail!("the first request {}", timeline.outcome);
            }
            counts.extend(timeline.usage.map(|usage| (words, usage.prompt_tokens)));
        }
        let measured = match counts[..] {
            [few, many] => Calibration::from_two(few, many),
            _ => None,
        };
        if measured.is_none() {
            println!("the server reports no usage: prompt lengths are estimates");
        }
        let line = measured.unwrap_or(ASSUMED);
        self.words = line.words_for(self.args.long_tokens).with_context(|| {
            format!(
                "--long-tokens {}: must be at least {:.0}, which is the frame of the prompt alone",
                self.args.long_tokens,
                line.tokens_fixed + line.tokens_per_word
            )
        })?;
        Ok(())
    }

    async fn long_alone(&mut self, arm: Arm, index: usize) {
        let seed = self.next_seed();
        let request = self.long(arm, seed, self.words);
        let timeline = self.client.chat(&request, None).await;
        let ttft = check_cold(&timeline).and_then(|()| ttft_s("long alone", &timeline));
        println!("{}", report::long_alone(arm, &timeline, &ttft));
        self.recorder.request("long_alone", Place { arm, repetition: None, index }, &timeline);
        self.recorder.long_alone(arm, ttft);
    }

    async fn repetition(&mut self, arm: Arm, repetition: usize) -> Repetition {
        let mut idle = Vec::new();
        for index in 0..self.args.idle_shorts {
            let seed = self.next_seed();
            let request = self.short(arm, seed);
            let timeline = self.client.chat(&request, None).await;
            self.recorder.request(
                "short_idle",
                Place { arm, repetition: Some(repetition), index },
                &timeline,
            );
            idle.push(timeline);
        }
        let (peer, longs, short) = self.disturbed(arm).await;
        let at = |index| Place { arm, repetition: Some(repetition), index };
        for (index, long) in longs.iter().enumerate() {
            self.recorder.request("long", at(index), long);
        }
        self.recorder.request("short_behind", at(0), &short);
        let mut undisturbed = None;
        if let Some(peer) = &peer {
            self.recorder.request("peer", at(0), peer);
            sleep(SETTLE).await;
            if let Some(window) = disturbed_window(&longs) {
                let control = self.undisturbed(arm, window.to - window.from).await;
                self.recorder.request("peer_control", at(0), &control.peer);
                self.recorder.request("short_control", at(0), &control.short);
                undisturbed = Some(control);
                sleep(SETTLE).await;
            }
        }
        Repetition { idle, longs, short, peer, undisturbed }
    }

    /// The peer stream if asked for, then the long prompts, then the short request.
    async fn disturbed(&mut self, arm: Arm) -> (Option<Timeline>, Vec<Timeline>, Timeline) {
        let peer_seed = self.args.stream_peer.then(|| self.next_seed());
        let long_seeds: Vec<u64> = (0..self.args.longs).map(|_| self.next_seed()).collect();
        let short_seed = self.next_seed();
        let offset = Duration::from_secs_f64(self.args.offset);

        let (control, handle) = follow();
        let peer = async {
            match peer_seed {
                Some(seed) => Some(self.client.chat(&self.peer(arm, seed), Some(control)).await),
                None => None,
            }
        };
        let script = async {
            if peer_seed.is_some() && handle.has_started().await {
                sleep(offset).await;
            }
            let long_requests: Vec<ChatRequest> =
                long_seeds.iter().map(|&seed| self.long(arm, seed, self.words)).collect();
            let longs = join_all(long_requests.iter().map(|request| self.client.chat(request, None)));
            let short = async {
                let request = self.short(arm, short_seed);
                sleep(offset).await;
                self.client.chat(&request, None).await
            };
            let (longs, short) = tokio::join!(longs, short);
            handle.stop();
            (longs, short)
        };
        let (peer, (longs, short)) = tokio::join!(peer, script);
        (peer, longs, short)
    }

    /// A peer stream and a short request as in `disturbed`, without the long prompts.
    async fn undisturbed(&mut self, arm: Arm, stretch: Duration) -> Undisturbed {
        let (peer_seed, short_seed) = (self.next_seed(), self.next_seed());
        let offset = Duration::from_secs_f64(self.args.offset);
        let (follower, handle) = follow();
        let request = self.peer(arm, peer_seed);
        let script = async {
            handle.has_started().await;
            sleep(offset).await;
            let from = self.client.now();
            let short = async {
                sleep(offset).await;
                self.client.chat(&self.short(arm, short_seed), None).await
            };
            let (short, ()) = tokio::join!(short, sleep(stretch));
            handle.stop();
            (short, Window { from, to: from + stretch })
        };
        let (peer, (short, window)) = tokio::join!(self.client.chat(&request, Some(follower)), script);
        Undisturbed { peer, short, window }
    }

    fn next_seed(&mut self) -> u64 {
        self.prompts += 1;
        // An odd constant keeps the seeds of neighbouring runs apart (Weyl sequence).
        self.seed.wrapping_add(self.prompts.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn long(&self, arm: Arm, seed: u64, words: usize) -> ChatRequest<'_> {
        self.request(arm, prompt::long(seed, words), self.args.long_max_tokens)
    }

    fn short(&self, arm: Arm, seed: u64) -> ChatRequest<'_> {
        self.request(arm, prompt::short(seed), self.args.short_max_tokens)
    }

    fn peer(&self, arm: Arm, seed: u64) -> ChatRequest<'_> {
        let request = self.request(arm, prompt::peer(seed), self.args.peer_max_tokens);
        ChatRequest { endless: true, ..request }
    }

    fn request(&self, arm: Arm, prompt: String, tokens_max: u32) -> ChatRequest<'_> {
        ChatRequest { model: &self.model, prompt, tokens_max, arm, endless: false, extra: &self.extra }
    }
}

/// The other end of a `Control`.
struct Handle {
    started: watch::Receiver<bool>,
    stop: watch::Sender<bool>,
}

fn follow() -> (Control, Handle) {
    let (started_tx, started) = watch::channel(false);
    let (stop, stop_rx) = watch::channel(false);
    (Control { started: started_tx, stop: stop_rx }, Handle { started, stop })
}

impl Handle {
    /// Waits for the first text; false if the stream ended without any.
    async fn has_started(&self) -> bool {
        self.started.clone().wait_for(|&started| started).await.is_ok()
    }

    fn stop(&self) {
        self.stop.send_replace(true);
    }
}
