//! The thread that owns the runner. Commands come in, it never waits for the network.
#![expect(clippy::disallowed_methods, reason = "a shell: it supplies the clock")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use host::ThreadEnd;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::runner::Runner;
use crate::sequence::{NewSequence, RequestKey};
use crate::stats::Stats;

/// Figures that change with every step are published this often; slots and
/// queues are published when they change.
const PUBLISH_EVERY: Duration = Duration::from_millis(100);

enum Command {
    Run(Box<NewSequence>),
    Cancel(RequestKey),
    Stop,
}

/// Handle to the engine thread; cheap to clone.
#[derive(Clone)]
pub(crate) struct Engine {
    commands: UnboundedSender<Command>,
}

impl Engine {
    /// Starts the thread. It ends on `stop` or a panic, and says so.
    pub(crate) fn start(runner: Runner, stats: Arc<Stats>) -> std::io::Result<(Self, ThreadEnd)> {
        let (commands, inbox) = unbounded_channel();
        let engine = EngineLoop { runner, stats, inbox, published: None };
        Ok((Self { commands }, host::thread("engine", engine.run())?))
    }

    /// Hands a sequence over. When the engine is gone the sequence is dropped,
    /// which closes its event channel.
    pub(crate) fn run(&self, sequence: NewSequence) {
        let _ = self.commands.send(Command::Run(Box::new(sequence)));
    }

    pub(crate) fn cancel(&self, key: RequestKey) {
        let _ = self.commands.send(Command::Cancel(key));
    }

    pub(crate) fn stop(&self) {
        let _ = self.commands.send(Command::Stop);
    }
}

struct EngineLoop {
    runner: Runner,
    stats: Arc<Stats>,
    inbox: UnboundedReceiver<Command>,
    /// When, and at which version of the runner.
    published: Option<(Instant, (u64, usize))>,
}

impl EngineLoop {
    async fn run(mut self) {
        let mut idle = true;
        while self.take_commands(idle).await {
            let step = self.runner.begin();
            idle = step.is_none();
            if let Some(step) = step {
                host::stepped().await;
                self.runner.end(step);
            }
            self.publish();
        }
    }

    /// Takes all commands waiting; if `idle`, there is nothing to do before the next.
    /// Returns false when it is time to stop.
    async fn take_commands(&mut self, idle: bool) -> bool {
        if idle && !self.inbox.recv().await.is_some_and(|command| self.take(command)) {
            return false;
        }
        loop {
            match self.inbox.try_recv() {
                Ok(command) => {
                    if !self.take(command) {
                        return false;
                    }
                }
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn take(&mut self, command: Command) -> bool {
        match command {
            Command::Run(sequence) => self.runner.enqueue(*sequence),
            Command::Cancel(key) => self.runner.cancel(key),
            Command::Stop => return false,
        }
        true
    }

    fn publish(&mut self) {
        let now = host::now();
        let version = self.runner.version();
        let (warm_changed, due) = match self.published {
            Some((at, before)) => {
                (before.0 != version.0, before != version || now.duration_since(at) >= PUBLISH_EVERY)
            }
            None => (true, true),
        };
        if !due {
            return;
        }
        let warm = warm_changed.then(|| {
            let chains = self.runner.warm_chains();
            chains.into_iter().map(|chain| chain.into_iter().map(|hash| hash.0).collect()).collect()
        });
        self.stats.publish_engine(self.runner.state(), warm);
        self.published = Some((now, version));
    }
}
