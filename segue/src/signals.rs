//! What ends a process: signals, and the death of the `segue up` that started it.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use kv_transfer::Shutdown;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// Set in the environment of children: their stdin is a pipe that the parent
/// holds open, so its end of file means that the parent is gone.
pub(crate) const SUPERVISED_VARIABLE: &str = "SEGUE_SUPERVISED";

/// Time that a process gets to end by itself after [`Shutdown::Now`]. Work is
/// only dropped then, never finished, so this is generous.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// The first SIGTERM or SIGINT means drain, the next one now. Runs until the
/// process ends. Must be called inside a runtime.
pub(crate) fn listen(shutdown: Arc<watch::Sender<Shutdown>>) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    #[expect(clippy::disallowed_methods, reason = "the shell of the process")]
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            shutdown.send_modify(|state| *state = next(state));
        }
    });
    Ok(())
}

/// Resolves when the process is to stop, gently or not.
pub(crate) async fn stopping(shutdown: &mut watch::Receiver<Shutdown>) {
    // An error means that the sender is gone, and with it whoever could stop us gently.
    let _ = shutdown.wait_for(|state| *state != Shutdown::Running).await;
}

/// Asks this process to end when its parent does, if a parent supervises it.
#[expect(clippy::disallowed_methods, reason = "the shell of the process")]
pub(crate) fn follow_parent(shutdown: &Arc<watch::Sender<Shutdown>>) {
    if std::env::var_os(SUPERVISED_VARIABLE).is_none() {
        return;
    }
    let shutdown = shutdown.clone();
    std::thread::spawn(move || {
        let mut buffer = [0; 64];
        while matches!(std::io::stdin().read(&mut buffer), Ok(read) if read > 0) {}
        shutdown.send_replace(Shutdown::Now);
    });
}

/// Ends this process some time after [`Shutdown::Now`], whatever it is doing.
/// Must be called inside a runtime.
pub(crate) fn enforce(mut shutdown: watch::Receiver<Shutdown>) {
    #[expect(clippy::disallowed_methods, reason = "the shell of the process")]
    tokio::spawn(async move {
        if shutdown.wait_for(|state| *state == Shutdown::Now).await.is_ok() {
            tokio::time::sleep(LAST_WORDS).await;
            tracing::warn!("stopped by force");
            std::process::exit(1);
        }
    });
}

fn next(state: &Shutdown) -> Shutdown {
    match state {
        Shutdown::Running => Shutdown::Draining,
        Shutdown::Draining | Shutdown::Now => Shutdown::Now,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_signal_ends_at_once() {
        let first = next(&Shutdown::Running);
        assert_eq!(first, Shutdown::Draining);
        assert_eq!(next(&first), Shutdown::Now);
        assert_eq!(next(&Shutdown::Now), Shutdown::Now);
    }
}
