//! What a node asks of the machine it runs on: the time, chance, tasks,
//! threads, and what the machine itself does to it.
//!
//! ```text
//!  nodes, router ──now, random, spawn, thread, blocking──▶ host ──▶ the real machine
//!                                                            └────▶ a simulated [`Machine`]
//! ```
//!
//! Every shell of the mesh goes through here, so that all of them can run in
//! one thread, in virtual time, on machines that lose packets, freeze and
//! crash. On a real machine each call is one thread-local look away from what
//! it stands for.
//!
//! The simulation stands in the same binary, so tokio's clock is one that can be
//! paused; it reads the real one unless a runtime has been paused.
//!
//! Not its job: sockets of a real machine; the mesh, but for the names of the
//! defects that a simulated machine can have ([`Bug`]).

mod machine;
mod tasks;
mod threads;

pub use machine::{Bug, Datagrams, Machine, Network};
pub use tasks::{Blocking, Task, blocking, spawn, spawn_on, task};
pub use threads::{SideRuntime, ThreadEnd, step_time, stepped, thread};

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The time of the machine; virtual on a simulated one.
#[expect(clippy::disallowed_methods, reason = "the one place that reads this clock")]
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Time since 1970, for dates that people read.
#[expect(clippy::disallowed_methods, reason = "the one place that reads this clock")]
pub fn unix_time() -> Duration {
    match Machine::current() {
        // Any moment will do, as long as it is the same one each time.
        Some(_) => Duration::from_secs(1_800_000_000),
        None => SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO),
    }
}

/// Bytes that nobody can guess; on a simulated machine, bytes of its seed.
#[expect(clippy::disallowed_methods, reason = "the one place that draws randomness")]
pub fn random_bytes<const N: usize>() -> [u8; N] {
    match Machine::current() {
        Some(machine) => machine.random_bytes(),
        None => rand::Rng::random(&mut rand::rng()),
    }
}

/// A number that nobody can guess; on a simulated machine, one of its seed.
pub fn random() -> u64 {
    u64::from_le_bytes(random_bytes())
}

/// Opens a socket of the simulated network; `None` on a real machine.
pub fn datagrams(address: SocketAddr) -> Option<std::io::Result<Arc<dyn Datagrams>>> {
    Machine::current().map(|machine| machine.bind(address))
}

/// Whether the simulated machine has this defect; never on a real one.
pub fn has(bug: Bug) -> bool {
    Machine::current().is_some_and(|machine| machine.bug() == Some(bug))
}
