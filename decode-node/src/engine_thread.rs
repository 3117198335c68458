//! The thread that owns the runner. Commands come in, it never waits for the network.
#![expect(clippy::disallowed_methods, reason = "a shell: it supplies the clock")]

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

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
    commands: Sender<Command>,
}

impl Engine {
    /// Starts the thread. It ends, and the join handle resolves, on `stop` or a panic.
    pub(crate) fn start(runner: Runner, stats: Arc<Stats>) -> std::io::Result<(Self, JoinHandle<()>)> {
        let (commands, inbox) = channel();
        let thread = std::thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || EngineLoop { runner, stats, inbox, published: None }.run())?;
        Ok((Self { commands }, thread))
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
    inbox: Receiver<Command>,
    /// When, and at which version of the runner.
    published: Option<(Instant, (u64, usize))>,
}

impl EngineLoop {
    fn run(mut self) {
        while self.take_commands() {
            self.runner.turn();
            self.publish();
        }
    }

    /// Takes all commands waiting; blocks while there is nothing to do.
    /// Returns false when it is time to stop.
    fn take_commands(&mut self) -> bool {
        if !self.runner.has_work() && !self.inbox.recv().is_ok_and(|command| self.take(command)) {
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
        let now = Instant::now();
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
