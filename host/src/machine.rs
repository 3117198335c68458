//! A simulated machine: what it does to the tasks that run on it.

use std::cell::RefCell;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{RngCore, SeedableRng};
use tokio::task::{AbortHandle, JoinHandle};

thread_local! {
    static CURRENT: RefCell<Option<Arc<Machine>>> = const { RefCell::new(None) };
}

/// Where the sockets of simulated machines meet.
pub trait Network: Send + Sync {
    /// A socket at `address`; port 0 asks for a free one.
    fn bind(&self, address: SocketAddr) -> std::io::Result<Arc<dyn Datagrams>>;
}

/// One UDP socket of the simulated network.
pub trait Datagrams: Send + Sync {
    /// The address in use.
    fn local_address(&self) -> SocketAddr;
    /// Sends one packet, which may never arrive.
    fn send(&self, to: SocketAddr, bytes: &[u8]);
    /// Next packet that arrived, written to `buffer`: its length and sender.
    fn poll_receive(&self, context: &mut Context<'_>, buffer: &mut [u8]) -> Poll<(usize, SocketAddr)>;
}

/// Defects planted in the mesh to prove that the simulation's checker sees
/// them. A simulated machine has at most one, a real one never.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bug {
    /// The router forgets the last token when it replays an answer elsewhere.
    ReplayDropsToken,
    /// The router sends the prompt alone when it replays an answer elsewhere.
    ReplayForgetsAnswer,
    /// A decode node keeps the slot of a sequence whose client has left.
    SlotKept,
    /// A decode node keeps the staging memory of a handoff that did not end well.
    StagingKept,
    /// A decode node takes one block more for salvaged than it has.
    SalvageTooMuch,
    /// A decode node cuts a warm slot one token too late.
    TruncateLate,
    /// A prefill node computes on behind what an earlier prompt left.
    SessionNotCut,
    /// The engine of a prefill node is not told of new prompts.
    WakeupLost,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::ReplayDropsToken,
        Self::ReplayForgetsAnswer,
        Self::SlotKept,
        Self::StagingKept,
        Self::SalvageTooMuch,
        Self::TruncateLate,
        Self::SessionNotCut,
        Self::WakeupLost,
    ];
}

/// A simulated machine. Tasks started on it, and those that they start, stop
/// while it is frozen and are gone once it is dead.
pub struct Machine {
    network: Arc<dyn Network>,
    bug: Option<Bug>,
    state: Mutex<State>,
}

struct State {
    rng: SmallRng,
    frozen: bool,
    dead: bool,
    /// The engine makes no progress, though all else does.
    engine_frozen: bool,
    /// Time that the engine's step takes and that has not passed yet.
    owed: Duration,
    /// Of tasks that wanted to run meanwhile.
    stopped: Vec<Waker>,
    tasks: Vec<AbortHandle>,
}

/// Ended tasks are forgotten when so many are known.
const TASKS_SWEPT_FROM: usize = 64;

impl Machine {
    /// A machine in `network`. All its chance follows from `seed`.
    pub fn new(network: Arc<dyn Network>, seed: u64, bug: Option<Bug>) -> Arc<Self> {
        let state = State {
            rng: SmallRng::seed_from_u64(seed),
            frozen: false,
            dead: false,
            engine_frozen: false,
            owed: Duration::ZERO,
            stopped: Vec::new(),
            tasks: Vec::new(),
        };
        Arc::new(Self { network, bug, state: Mutex::new(state) })
    }

    /// The machine that the running task is on; `None` on a real one.
    pub fn current() -> Option<Arc<Self>> {
        CURRENT.with_borrow(Clone::clone)
    }

    /// Starts a task on this machine.
    #[expect(clippy::disallowed_methods, reason = "a machine is where tasks start")]
    pub fn spawn<F>(self: &Arc<Self>, future: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        self.enter(|| crate::spawn(future))
    }

    /// Runs `work` as if on this machine.
    pub fn enter<R>(self: &Arc<Self>, work: impl FnOnce() -> R) -> R {
        struct Restore(Option<Arc<Machine>>);
        impl Drop for Restore {
            fn drop(&mut self) {
                CURRENT.set(self.0.take());
            }
        }
        let _restore = Restore(CURRENT.replace(Some(self.clone())));
        work()
    }

    /// Stops all tasks where they are, as SIGSTOP does.
    pub fn freeze(&self) {
        self.state().frozen = true;
    }

    /// Lets only the engine stand still; the rest of the node answers.
    pub fn freeze_engine(&self) {
        self.state().engine_frozen = true;
    }

    /// Ends [`Machine::freeze`] and [`Machine::freeze_engine`].
    pub fn thaw(&self) {
        let mut state = self.state();
        state.frozen = false;
        state.engine_frozen = false;
        let stopped = std::mem::take(&mut state.stopped);
        drop(state);
        stopped.into_iter().for_each(Waker::wake);
    }

    /// Ends all tasks without a word to anybody.
    pub fn kill(&self) {
        let mut state = self.state();
        state.dead = true;
        let (tasks, stopped) = (std::mem::take(&mut state.tasks), std::mem::take(&mut state.stopped));
        drop(state);
        tasks.iter().for_each(AbortHandle::abort);
        drop(stopped);
    }

    pub(crate) fn bug(&self) -> Option<Bug> {
        self.bug
    }

    pub(crate) fn random_bytes<const N: usize>(&self) -> [u8; N] {
        let mut bytes = [0; N];
        self.state().rng.fill_bytes(&mut bytes);
        bytes
    }

    pub(crate) fn bind(&self, address: SocketAddr) -> std::io::Result<Arc<dyn Datagrams>> {
        self.network.bind(address)
    }

    pub(crate) fn register(&self, task: AbortHandle) {
        let mut state = self.state();
        if state.dead {
            task.abort();
            return;
        }
        if state.tasks.len() >= TASKS_SWEPT_FROM && state.tasks.len().is_power_of_two() {
            state.tasks.retain(|task| !task.is_finished());
        }
        state.tasks.push(task);
    }

    /// Whether a task may run now; if not, it is woken when it may.
    pub(crate) fn runs(&self, context: &Context<'_>) -> bool {
        let mut state = self.state();
        if state.frozen {
            state.stopped.push(context.waker().clone());
        }
        !state.frozen && !state.dead
    }

    /// Whether the engine moves; if not, `context` is woken when it does.
    pub(crate) fn engine_runs(&self, context: &Context<'_>) -> bool {
        let mut state = self.state();
        if state.engine_frozen {
            state.stopped.push(context.waker().clone());
        }
        !state.engine_frozen
    }

    pub(crate) fn owe(&self, time: Duration) {
        self.state().owed += time;
    }

    pub(crate) fn take_owed(&self) -> Duration {
        std::mem::take(&mut self.state().owed)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
