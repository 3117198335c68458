//! `segue up`: a whole mesh on one machine, in processes of its own.
//!
//! ```text
//!  plan ──▶ files in DATA/run and DATA/keys ──▶ one supervised child per role
//!                                                │ ready: `ready http://…`
//!       signal ──▶ SIGTERM to all ──▶ drain ──▶ exit 0
//! ```
//!
//! Children end with this process even if it is killed: each holds the reading
//! end of a pipe that closes with it.

mod child;
mod plan;
mod ready;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use kv_transfer::Shutdown;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::signals;
use child::Exit;
use plan::Plan;

/// What kind of mesh to run.
#[derive(clap::Args)]
pub(crate) struct UpArgs {
    /// GGUF file, or `demo` for the demo model in the cache.
    #[arg(long, default_value = "demo", value_name = "PATH|demo")]
    model: PathBuf,
    /// Address for clients; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "IP:PORT")]
    listen: SocketAddr,
    /// Nodes that compute long prompts.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(0..=64), value_name = "N")]
    prefill_nodes: u16,
    /// Nodes that run sequences.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64), value_name = "N")]
    decode_nodes: u16,
    /// Policy file for the router (TOML) [default: long prompts go to prefill nodes].
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// Folder for configurations and throw-away keys [default: temporary].
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
}

/// A drain that takes longer than the nodes' own limit is stuck.
const DRAIN_LIMIT: Duration = Duration::from_secs(plan::DRAIN_SECONDS + 5);
/// Before it is ready, a mesh has no work that deserves a longer wait.
const ABANDON_LIMIT: Duration = Duration::from_secs(3);

/// Runs the mesh until a signal ends it.
pub(crate) fn run(args: &UpArgs) -> anyhow::Result<()> {
    let plan = Plan::make(args)?;
    if plan.is_shared() {
        tracing::warn!(nodes = plan.nodes(), "fewer CPUs than nodes: they share, and slow each other down");
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(supervise(&plan))
}

async fn supervise(plan: &Plan) -> anyhow::Result<()> {
    let shutdown = Arc::new(watch::Sender::new(Shutdown::Running));
    signals::listen(shutdown.clone())?;
    signals::follow_parent(&shutdown);
    let (exits, mut exited) = mpsc::channel(16);
    let mut children = JoinSet::new();
    for spec in plan.children() {
        children.spawn(child::keep_running(spec.clone(), shutdown.subscribe(), exits.clone()));
    }
    drop(exits);

    let mut stop = shutdown.subscribe();
    let outcome = tokio::select! {
        outcome = until_ready(plan, &mut exited) => outcome,
        () = signals::stopping(&mut stop) => Ok(false),
    };
    let limit = match outcome {
        Ok(true) => {
            println!("ready http://{}", plan.listen());
            report_exits(&mut exited, stop).await;
            DRAIN_LIMIT
        }
        Ok(false) | Err(_) => ABANDON_LIMIT,
    };
    stop_all(&shutdown, children, limit).await;
    outcome.map(|_| ())
}

/// `Ok(true)` when requests can be served; an error if a child gave up first.
async fn until_ready(plan: &Plan, exited: &mut mpsc::Receiver<Exit>) -> anyhow::Result<bool> {
    tokio::select! {
        () = ready::wait(plan.listen(), plan.nodes()) => Ok(true),
        Some(exit) = exited.recv() => Err(anyhow::anyhow!("{exit}")),
    }
}

/// Says which children end and are started again, until the mesh is to stop.
async fn report_exits(exited: &mut mpsc::Receiver<Exit>, mut stop: watch::Receiver<Shutdown>) {
    loop {
        tokio::select! {
            () = signals::stopping(&mut stop) => return,
            Some(exit) = exited.recv() => tracing::warn!("{exit}; starting it again"),
        }
    }
}

async fn stop_all(shutdown: &watch::Sender<Shutdown>, mut children: JoinSet<()>, limit: Duration) {
    shutdown.send_if_modified(|state| {
        let running = *state == Shutdown::Running;
        if running {
            *state = Shutdown::Draining;
        }
        running
    });
    let drained = async { while children.join_next().await.is_some() {} };
    if tokio::time::timeout(limit, drained).await.is_err() {
        shutdown.send_replace(Shutdown::Now);
        while children.join_next().await.is_some() {}
    }
}
