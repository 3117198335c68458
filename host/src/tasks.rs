//! Tasks, and work that would hold them up.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use crate::Machine;

pin_project! {
    /// A future that runs on the machine where it was made.
    pub struct Task<F> {
        machine: Option<Arc<Machine>>,
        #[pin]
        future: F,
    }
}

impl<F: Future> Future for Task<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        match this.machine {
            None => this.future.poll(context),
            Some(machine) if machine.runs(context) => machine.enter(|| this.future.poll(context)),
            Some(_) => Poll::Pending,
        }
    }
}

/// Makes `future` a task of this machine, for a `JoinSet`.
pub fn task<F: Future>(future: F) -> Task<F> {
    Task { machine: Machine::current(), future }
}

/// Starts a task. It goes on when the handle is dropped.
#[expect(clippy::disallowed_methods, reason = "what it stands for")]
pub fn spawn<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    known(tokio::spawn(task(future)))
}

/// Starts a task on another runtime.
pub fn spawn_on<F>(runtime: &Handle, future: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    known(runtime.spawn(task(future)))
}

fn known<T>(task: JoinHandle<T>) -> JoinHandle<T> {
    if let Some(machine) = Machine::current() {
        machine.register(task.abort_handle());
    }
    task
}

/// Result of work that runs where it holds nobody up; see [`blocking`].
pub enum Blocking<T> {
    /// On a thread of the runtime's pool.
    Thread(JoinHandle<T>),
    /// Done already: a simulated machine has one thread.
    Done(Option<T>),
}

/// The result is moved out, never pinned.
impl<T> Unpin for Blocking<T> {}

impl<T> Future for Blocking<T> {
    type Output = Result<T, String>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.get_mut() {
            Self::Thread(handle) => {
                Poll::Ready(ready!(Pin::new(handle).poll(context)).map_err(|error| error.to_string()))
            }
            Self::Done(result) => Poll::Ready(result.take().ok_or_else(|| "polled after its end".to_owned())),
        }
    }
}

/// Runs slow work off the async threads. The error says that it panicked.
#[expect(clippy::disallowed_methods, reason = "what it stands for")]
pub fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Blocking<T> {
    match Machine::current() {
        Some(_) => Blocking::Done(Some(work())),
        None => Blocking::Thread(tokio::task::spawn_blocking(work)),
    }
}
