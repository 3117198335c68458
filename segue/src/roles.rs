//! `segue router|prefill|decode`: from a configuration file to a running role.
//!
//! The order matters: the process is pinned before any thread exists, and it
//! follows its parent before the weights are read.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use decode_node::DecodeConfig;
use engine::llama;
use kv_transfer::{Credentials, Role, Shutdown};
use prefill_node::PrefillConfig;
use router::{ModelIdentity, RouterConfig};
use tokio::sync::watch;

use crate::{cpus, model, signals};

/// Enough for the network; prompts and tokens are computed on threads of their own.
const WORKER_THREADS: usize = 2;

/// Runs a benchmark to its end.
pub(crate) fn bench(command: bench::Command) -> anyhow::Result<()> {
    runtime()?.block_on(bench::run(command))
}

/// Runs a router until it is told to stop.
pub(crate) fn router(path: &Path) -> anyhow::Result<()> {
    let config = RouterConfig::read(path)?;
    let credentials = Credentials::load(&config.keys_dir, &config.name, Role::Router)?;
    model::require(&config.model)?;
    run(async |shutdown| {
        let vocabulary = llama::load_vocabulary(&config.model)?;
        let identity = identity(&config)?;
        router::run(config, vocabulary, identity, credentials, shutdown).await?;
        Ok(())
    })
}

/// Runs a prefill node until it is told to stop.
pub(crate) fn prefill(path: &Path) -> anyhow::Result<()> {
    let config = PrefillConfig::read(path)?;
    cpus::pin(&config.cpus).with_context(|| path.display().to_string())?;
    let credentials = Credentials::load(&config.keys_dir, &config.name, Role::Prefill)?;
    model::require(&config.model)?;
    run(async |shutdown| {
        let model = llama::load(&config.model)?;
        prefill_node::run(config, model, credentials, shutdown).await?;
        Ok(())
    })
}

/// Runs a decode node until it is told to stop.
pub(crate) fn decode(path: &Path) -> anyhow::Result<()> {
    let config = DecodeConfig::read(path)?;
    cpus::pin(&config.cpus).with_context(|| path.display().to_string())?;
    let credentials = Credentials::load(&config.keys_dir, &config.name, Role::Decode)?;
    model::require(&config.model)?;
    run(async |shutdown| {
        let model = llama::load(&config.model)?;
        decode_node::run(config, model, credentials, shutdown).await?;
        Ok(())
    })
}

fn run(role: impl AsyncFnOnce(watch::Receiver<Shutdown>) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let shutdown = Arc::new(watch::Sender::new(Shutdown::Running));
    signals::follow_parent(&shutdown);
    raise_descriptor_limit();
    if std::env::var_os(CORE_DUMPS_VARIABLE).is_none() {
        keep_memory_out_of_core_dumps();
    }
    let runtime = runtime()?;
    let outcome = runtime.block_on(async {
        signals::listen(shutdown.clone())?;
        signals::enforce(shutdown.subscribe());
        role(shutdown.subscribe()).await
    });
    // Blocking work that is still under way must not keep the process alive.
    runtime.shutdown_background();
    outcome
}

/// Set to anything, a crash leaves a core dump where the system is set up so.
const CORE_DUMPS_VARIABLE: &str = "SEGUE_CORE_DUMPS";

/// The memory of every role holds prompts and answers.
fn keep_memory_out_of_core_dumps() {
    use rustix::process::{DumpableBehavior, set_dumpable_behavior};
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::warn!(%error, "a crash may leave a core dump, and with it prompts");
    }
}

/// Each client has a socket, and the usual soft limit of 1,024 is for programs
/// that use `select`.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "the limit of open files stays as it was");
    }
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKER_THREADS)
        .enable_all()
        .build()
        .context("cannot start the runtime")
}

fn identity(config: &RouterConfig) -> anyhow::Result<ModelIdentity> {
    let summary = llama::model_summary(&config.model)?;
    Ok(ModelIdentity {
        name: summary.name,
        alias: config.alias(),
        fingerprint: llama::fingerprint(&config.model)?,
        context_tokens_max: summary.context_tokens_max,
    })
}

#[cfg(test)]
mod tests {
    use rustix::process::{DumpableBehavior, dumpable_behavior};

    #[test]
    fn core_dumps_are_off() {
        super::keep_memory_out_of_core_dumps();
        assert_eq!(dumpable_behavior().unwrap(), DumpableBehavior::NotDumpable);
    }
}
