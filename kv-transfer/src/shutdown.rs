//! What a node is asked to do by its signal handler.

/// Passed to every node through a `tokio::sync::watch` channel; only ever goes
/// forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Shutdown {
    /// Serve.
    #[default]
    Running,
    /// Take nothing new, finish what runs (first SIGTERM).
    Draining,
    /// End at once (second SIGTERM, or the drain time is over).
    Now,
}
