//! The scheduler, shared by the engine thread and the handoff tasks.
//!
//! A lock around the scheduler, and not a channel to the engine thread, so that
//! a prompt is admitted or refused, and a departed one is gone from the queue
//! and the status, at once and not only when the running chunk is through.
//! Nothing slow happens under the lock.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use engine::ExportedRows;
use host::Bug;
use tokio::sync::{Notify, mpsc};

use crate::board::Board;
use crate::scheduler::{Admission, Chunk, Prompt, PromptId, Scheduler, SchedulerConfig};

/// What the engine thread tells a handoff task, in order.
#[derive(Debug)]
pub(crate) enum Computed {
    /// The prompt's turn has come.
    Started { reused: usize },
    /// KV up to `tokens` is there. `rows` are those to send, if any.
    Chunk { tokens: usize, rows: Option<ExportedRows> },
    /// That was the last chunk.
    Finished,
    /// The engine could not compute the prompt.
    Failed(String),
}

/// Cheap to clone.
#[derive(Clone)]
pub(crate) struct WorkQueue {
    shared: Arc<Shared>,
}

struct Shared {
    inner: Mutex<Inner>,
    /// For the engine thread, which alone waits.
    changed: Notify,
    board: Board,
}

struct Inner {
    scheduler: Scheduler,
    outputs: HashMap<PromptId, mpsc::UnboundedSender<Computed>>,
    stopped: bool,
}

/// Answer to a new prompt.
pub(crate) enum Submitted {
    /// In the queue.
    Queued(Ticket),
    /// No room; the text says which limit.
    Full(String),
}

/// A prompt's place in the queue. Dropping it takes the prompt out.
pub(crate) struct Ticket {
    pub(crate) tokens_ahead: usize,
    pub(crate) expected_start: Duration,
    /// Unbounded as a channel; the scheduler bounds the chunks in it.
    pub(crate) computed: mpsc::UnboundedReceiver<Computed>,
    id: PromptId,
    queue: WorkQueue,
}

impl WorkQueue {
    pub(crate) fn new(config: SchedulerConfig, board: Board) -> Self {
        let inner = Inner { scheduler: Scheduler::new(config), outputs: HashMap::new(), stopped: false };
        Self { shared: Arc::new(Shared { inner: Mutex::new(inner), changed: Notify::new(), board }) }
    }

    /// From now on so many exported tokens may wait for the network.
    pub(crate) fn allow_unsent(&self, tokens: usize) {
        self.with(|inner| inner.scheduler.allow_unsent(tokens));
    }

    /// Puts a prompt into the queue.
    pub(crate) fn submit(&self, now: Instant, prompt: Prompt) -> Submitted {
        let (output, computed) = mpsc::unbounded_channel();
        let admission = self.with(|inner| {
            let admission = inner.scheduler.admit(now, prompt);
            if let Admission::Queued { id, .. } = admission {
                inner.outputs.insert(id, output);
            }
            admission
        });
        match admission {
            Admission::Queued { id, tokens_ahead, expected_start } => {
                Submitted::Queued(Ticket { tokens_ahead, expected_start, computed, id, queue: self.clone() })
            }
            Admission::TokensFull { queued, limit } => {
                Submitted::Full(format!("{queued} prompt tokens are queued, limit {limit}"))
            }
            Admission::PromptsFull { limit } => {
                Submitted::Full(format!("{limit} prompts are queued, the limit"))
            }
        }
    }

    /// Waits for the next chunk; `None` after [`WorkQueue::stop`]. For the
    /// engine thread alone.
    pub(crate) async fn next(&self, now: impl Fn() -> Instant) -> Option<Work> {
        loop {
            match self.planned(now()) {
                Planned::Work(work) => return Some(work),
                Planned::Stopped => return None,
                // A change since is remembered.
                Planned::Nothing => self.shared.changed.notified().await,
            }
        }
    }

    fn planned(&self, now: Instant) -> Planned {
        let mut inner = self.lock();
        if inner.stopped {
            return Planned::Stopped;
        }
        let Some(chunk) = inner.scheduler.plan(now) else { return Planned::Nothing };
        let output = inner.outputs.get(&chunk.id).cloned();
        self.shared.board.queue(inner.scheduler.figures());
        Planned::Work(Work { chunk, output })
    }

    /// The engine is through with a chunk.
    pub(crate) fn chunk_done(&self, chunk: &Chunk, took: Duration) {
        self.with(|inner| inner.scheduler.chunk_done(chunk, took));
    }

    /// The engine could not compute a chunk and has cleared its session.
    pub(crate) fn chunk_failed(&self, chunk: &Chunk) {
        self.with(|inner| inner.scheduler.chunk_failed(chunk));
    }

    /// Ends the engine thread before its next chunk.
    pub(crate) fn stop(&self) {
        self.with(|inner| inner.stopped = true);
    }

    /// Publishes while the lock is held: an older figure never replaces a newer one.
    fn with<R>(&self, change: impl FnOnce(&mut Inner) -> R) -> R {
        let mut inner = self.lock();
        let answer = change(&mut inner);
        self.shared.board.queue(inner.scheduler.figures());
        drop(inner);
        if !host::has(Bug::WakeupLost) {
            self.shared.changed.notify_one();
        }
        answer
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.shared.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Planned {
    Work(Work),
    Nothing,
    Stopped,
}

/// A chunk for the engine, and where its results go.
pub(crate) struct Work {
    pub(crate) chunk: Chunk,
    output: Option<mpsc::UnboundedSender<Computed>>,
}

impl Work {
    /// Tells the handoff task, if it is still there.
    pub(crate) fn tell(&self, computed: Computed) {
        if let Some(output) = &self.output {
            let _ = output.send(computed);
        }
    }
}

impl Ticket {
    /// All bytes of one exported chunk are on the network.
    pub(crate) fn chunk_sent(&self) {
        self.queue.with(|inner| inner.scheduler.chunk_sent(self.id));
    }

    /// Takes the prompt out of the queue; the engine stops before its next chunk.
    pub(crate) fn stop(&self) {
        self.queue.with(|inner| {
            inner.outputs.remove(&self.id);
            inner.scheduler.remove(self.id);
        });
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.stop();
    }
}
