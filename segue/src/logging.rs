//! Logs go to stderr; stdout belongs to results.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// Starts the line with which a process says why it gives up. `segue up`
/// recognises it in the output of its children.
pub(crate) const FATAL_PREFIX: &str = "segue: ";

/// Variable that selects what is logged, before `RUST_LOG`.
pub(crate) const LOG_VARIABLE: &str = "SEGUE_LOG";

/// The mesh at `info`, libraries at `warn`.
pub(crate) const DEFAULT_FILTER: &str =
    "warn,segue=info,router=info,prefill_node=info,decode_node=info,kv_transfer=info,engine=info";

/// For the simulation: thousands of nodes die and come back there.
pub(crate) const QUIET_FILTER: &str = "off";

/// Sends events to stderr, filtered by `SEGUE_LOG`, else `RUST_LOG`, else `default`.
pub(crate) fn start(default: &str) {
    tracing_subscriber::fmt()
        .with_env_filter(filter(default))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
}

/// Whether the user chose what is logged.
pub(crate) fn chosen_by_user() -> bool {
    chosen().is_some()
}

fn filter(default: &str) -> EnvFilter {
    let directives = chosen().unwrap_or_else(|| default.to_owned());
    EnvFilter::try_new(&directives).unwrap_or_else(|error| {
        eprintln!("{FATAL_PREFIX}ignoring log filter {directives:?}: {error}");
        EnvFilter::new(default)
    })
}

fn chosen() -> Option<String> {
    [LOG_VARIABLE, "RUST_LOG"]
        .iter()
        .find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
}
