//! One run: a seed, a mix, some requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use host::Bug;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::Value;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::checker::{Checker, Findings};
use crate::client::{self, Connection};
use crate::faults;
use crate::mesh::Mesh;
use crate::mix::{Allowed, Mix};
use crate::now;
use crate::workload::Workload;

/// What to simulate.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// What goes wrong.
    pub mix: Mix,
    /// Requests that clients send.
    pub requests: usize,
    /// A defect in the mesh that must be found.
    pub bug: Option<Bug>,
    /// Whether the trace is kept.
    pub logged: bool,
}

/// A fresh mesh is complete within this time.
const READY_WITHIN: Duration = Duration::from_secs(20);
/// A mesh that is left alone is whole and empty again within this time: dead
/// connections take 12 s to be noticed, and other waits follow.
const SETTLED_WITHIN: Duration = Duration::from_secs(90);
/// A healthy, idle mesh answers the longest prompt in a fraction of this.
const PROBES_WITHIN: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(250);

std::thread_local! {
    static PANICS: AtomicUsize = const { AtomicUsize::new(0) };
}

/// Counts panics of simulated tasks, which the runtime would swallow; those
/// of other threads are printed as ever. Once per process.
fn count_panics() {
    static HOOK: std::sync::Once = std::sync::Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICS.with(|panics| panics.fetch_add(1, Ordering::Relaxed));
            before(info);
        }));
    });
}

/// A quarter of a virtual second takes milliseconds. Where it takes so long, some
/// task goes round in circles.
const MOVES_WITHIN: Duration = Duration::from_secs(120);

/// Ends the process if the run stands still. The sender's drop calls it off.
#[expect(clippy::disallowed_methods, reason = "it watches over real time")]
fn end_if_stuck(seed: u64, options: Options, looks: Arc<AtomicUsize>) -> Sender<()> {
    let (over, wait) = channel();
    std::thread::spawn(move || {
        let mut before = usize::MAX;
        while wait.recv_timeout(MOVES_WITHIN) == Err(RecvTimeoutError::Timeout) {
            let now = looks.load(Ordering::Relaxed);
            if now == before {
                eprintln!("seed {seed}, {options:?}: no time passes, some task never waits");
                std::process::abort();
            }
            before = now;
        }
    });
    over
}

/// Runs `seed`.
pub fn simulate(seed: u64, options: &Options) -> Findings {
    count_panics();
    let looks = Arc::new(AtomicUsize::new(0));
    let _over = end_if_stuck(seed, *options, looks.clone());
    let panics = || PANICS.with(|panics| panics.load(Ordering::Relaxed));
    let before = panics();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime without sockets needs nothing");
    let mut findings = runtime.block_on(drive(seed, options, looks));
    drop(runtime);
    if panics() > before {
        findings.violations.push(format!("{} panics", panics() - before));
    }
    findings
}

async fn drive(seed: u64, options: &Options, looks: Arc<AtomicUsize>) -> Findings {
    let mut rng = SmallRng::seed_from_u64(seed);
    let checker = Arc::new(Checker::new(now(), options.logged));
    let mesh = Mesh::new(rng.random(), options.mix, options.bug, checker.clone());
    let network = mesh.network.clone();
    let mut background = JoinSet::new();
    background.spawn(async move { network.carry().await });
    background.spawn(async move {
        loop {
            looks.fetch_add(1, Ordering::Relaxed);
            sleep(LOOK_EVERY).await;
        }
    });
    mesh.places.iter().for_each(|place| mesh.start(place));
    settle(&mesh, &checker, READY_WITHIN).await;

    let mut disturbances = JoinSet::new();
    for _ in 0..options.mix.faults_at_once() {
        let own = SmallRng::seed_from_u64(rng.random());
        disturbances.spawn(faults::disturb(mesh.clone(), options.mix, own, checker.clone()));
    }
    background.spawn(watch_bounds(mesh.clone(), checker.clone()));
    let mut workload = Workload::new(&mesh.oracle, options.mix.shape(), &mut rng);
    let mut clients = JoinSet::new();
    let places = Arc::new(Semaphore::new(options.mix.clients_max()));
    for _ in 0..options.requests {
        let plan = workload.next(&mut rng);
        sleep(plan.pause).await;
        let Ok(permit) = places.clone().acquire_owned().await else { break };
        let allowed = options.mix.allowed();
        let client = client::run(mesh.clone(), plan, checker.clone(), allowed, client::PATIENCE);
        clients.spawn(async move {
            client.await;
            drop(permit);
        });
    }
    while clients.join_next().await.is_some() {}
    disturbances.shutdown().await;

    checker.note("healed".to_owned());
    faults::heal(&mesh);
    settle(&mesh, &checker, SETTLED_WITHIN).await;
    for probe in workload.probes(&mut rng) {
        client::run(mesh.clone(), probe, checker.clone(), Allowed::NOTHING, PROBES_WITHIN).await;
    }
    checker.findings()
}

/// Waits until the mesh is whole and has nothing to do.
async fn settle(mesh: &Mesh, checker: &Checker, within: Duration) {
    let mut left = "nothing answers".to_owned();
    let settled = async {
        loop {
            faults::restart(mesh);
            if let Some(status) = status(mesh).await {
                left = checker.leftovers(mesh, &status);
                if left.is_empty() {
                    return;
                }
            }
            sleep(LOOK_EVERY).await;
        }
    };
    let result = timeout(within, settled).await;
    if result.is_err() {
        checker.violation(format!("the mesh has not settled after {} s: {left}", within.as_secs()));
    }
}

async fn watch_bounds(mesh: Arc<Mesh>, checker: Arc<Checker>) {
    loop {
        sleep(LOOK_EVERY).await;
        if let Some(status) = status(&mesh).await {
            checker.check_bounds(&mesh, &status);
        }
    }
}

/// The router's view; `None` if it does not answer.
async fn status(mesh: &Mesh) -> Option<Value> {
    let request = Request::get("/mesh/status").body(Body::empty()).expect("the parts are valid");
    let mut connection = Connection::open(mesh, request)?;
    let read = async { connection.head().await && connection.rest().await };
    match timeout(LOOK_EVERY, read).await {
        Ok(true) => serde_json::from_slice(&connection.body).ok(),
        _ => None,
    }
}
