//! Threads with a loop of their own, and the time that engines take.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Poll;
use std::time::Duration;

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::oneshot;

use crate::Machine;

/// Resolves when a [`thread`] has ended; `Err` holds the message of a panic.
pub type ThreadEnd = oneshot::Receiver<Result<(), String>>;

/// Runs `body` on a thread of its own, of which it may block nothing but itself.
#[expect(clippy::disallowed_methods, reason = "what a simulated machine has for a thread")]
pub fn thread<F>(name: &str, body: F) -> std::io::Result<ThreadEnd>
where
    F: Future<Output = ()> + Send + 'static,
{
    let (ended, end) = oneshot::channel();
    if Machine::current().is_some() {
        crate::spawn(async move {
            body.await;
            let _ = ended.send(Ok(()));
        });
        return Ok(end);
    }
    // No drivers: the body waits for channels only.
    let runtime = Builder::new_current_thread().build()?;
    start(name, move || {
        let result = catch_unwind(AssertUnwindSafe(|| runtime.block_on(body)));
        let _ = ended.send(result.map_err(|panic| panic_text(&*panic)));
    })?;
    Ok(end)
}

/// A runtime for network traffic beside the main one, on a thread of its own
/// once it is started. On a simulated machine there is one thread for all.
pub struct SideRuntime {
    handle: Handle,
    runtime: Option<Runtime>,
}

impl SideRuntime {
    /// Nothing runs on it yet.
    pub fn new() -> std::io::Result<Self> {
        if Machine::current().is_some() {
            return Ok(Self { handle: Handle::current(), runtime: None });
        }
        let runtime = Builder::new_current_thread().enable_all().build()?;
        Ok(Self { handle: runtime.handle().clone(), runtime: Some(runtime) })
    }

    /// To start tasks and open sockets there.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Starts the thread, which runs `first` before anything else and never ends.
    pub fn start(self, name: &str, first: impl FnOnce() + Send + 'static) -> std::io::Result<Handle> {
        if let Some(runtime) = self.runtime {
            start(name, move || {
                first();
                runtime.block_on(std::future::pending::<()>());
            })?;
        }
        Ok(self.handle)
    }
}

#[expect(clippy::disallowed_methods, reason = "the one place that starts threads")]
fn start(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    std::thread::Builder::new().name(name.to_owned()).spawn(body).map(drop)
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("panicked: {}", text.unwrap_or("without a message"))
}

/// For engines that only pretend to compute: takes `time`. On a simulated
/// machine it passes in the next [`stepped`].
pub fn step_time(time: Duration) {
    match Machine::current() {
        Some(machine) => machine.owe(time),
        None => std::thread::sleep(time),
    }
}

/// To be awaited after each step of an engine. At once on a real machine,
/// where the step has taken its time already.
pub async fn stepped() {
    let Some(machine) = Machine::current() else { return };
    let time = machine.take_owed();
    if !time.is_zero() {
        tokio::time::sleep(time).await;
    }
    poll_fn(|context| if machine.engine_runs(context) { Poll::Ready(()) } else { Poll::Pending }).await;
}
