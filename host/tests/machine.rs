//! What a simulated machine does to its tasks.
#![expect(clippy::disallowed_methods, reason = "tests of what shells use")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use host::{Bug, Datagrams, Machine, Network};
use tokio::time::sleep;

/// None of these tests sends anything.
struct NoNetwork;

impl Network for NoNetwork {
    fn bind(&self, _address: SocketAddr) -> std::io::Result<Arc<dyn Datagrams>> {
        Err(std::io::ErrorKind::Unsupported.into())
    }
}

fn machine(seed: u64) -> Arc<Machine> {
    Machine::new(Arc::new(NoNetwork), seed, Some(Bug::SlotKept))
}

const TICK: Duration = Duration::from_millis(10);

/// Counts ticks for ever, in a task that a task has started.
fn count(machine: &Arc<Machine>) -> Arc<AtomicU32> {
    let ticks = Arc::new(AtomicU32::new(0));
    let seen = ticks.clone();
    machine.spawn(async move {
        host::spawn(async move {
            loop {
                sleep(TICK).await;
                ticks.fetch_add(1, Relaxed);
            }
        });
    });
    seen
}

#[tokio::test(start_paused = true)]
async fn a_frozen_machine_stands_still_and_goes_on() {
    let machine = machine(0);
    let ticks = count(&machine);
    sleep(TICK * 10 + TICK / 2).await;
    assert_eq!(ticks.load(Relaxed), 10);
    machine.freeze();
    sleep(TICK * 100).await;
    assert_eq!(ticks.load(Relaxed), 10);
    machine.thaw();
    sleep(TICK * 10).await;
    assert_eq!(ticks.load(Relaxed), 20);
}

#[tokio::test(start_paused = true)]
async fn a_dead_machine_has_no_tasks_and_drops_what_they_held() {
    let machine = machine(0);
    let ticks = count(&machine);
    sleep(TICK * 2 + TICK / 2).await;
    machine.freeze();
    machine.kill();
    sleep(TICK).await;
    assert_eq!(Arc::strong_count(&ticks), 1, "the task's share is gone");
    assert_eq!(ticks.load(Relaxed), 2);
    let late = machine.spawn(async { 7 });
    assert!(late.await.unwrap_err().is_cancelled());
}

#[tokio::test(start_paused = true)]
async fn steps_take_virtual_time_and_stop_with_their_engine() {
    let machine = machine(0);
    let began = host::now();
    let step = || {
        machine.spawn(async {
            host::step_time(Duration::from_secs(3600));
            host::stepped().await;
            host::now()
        })
    };
    assert_eq!(step().await.unwrap().duration_since(began), Duration::from_secs(3600));
    machine.freeze_engine();
    let stuck = step();
    sleep(Duration::from_secs(10_000)).await;
    assert!(!stuck.is_finished());
    machine.thaw();
    stuck.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn chance_follows_the_seed_and_dates_stand_still() {
    let draw = |seed| machine(seed).enter(|| (host::random(), host::random_bytes::<16>(), host::unix_time()));
    assert_eq!(draw(1), draw(1));
    assert_ne!(draw(1), draw(2));
}

#[tokio::test(start_paused = true)]
async fn threads_and_blocking_work_run_as_tasks() {
    let machine = machine(0);
    let ended = machine.enter(|| host::thread("loop", sleep(TICK)).unwrap());
    assert_eq!(ended.await.unwrap(), Ok(()));
    assert_eq!(machine.spawn(async { host::blocking(|| 5).await }).await.unwrap(), Ok(5));
}

#[tokio::test]
async fn a_real_machine_has_no_bugs_and_no_simulated_sockets() {
    assert!(Bug::ALL.iter().all(|&bug| !host::has(bug)));
    assert!(host::datagrams("127.0.0.1:0".parse().unwrap()).is_none());
    assert_ne!(host::random(), host::random());
    assert_eq!(host::blocking(|| 5).await, Ok(5));
    let error = host::blocking(|| panic!("as asked")).await.map(|(): ()| ()).unwrap_err();
    assert!(error.contains("panicked"), "{error}");
    let ended = host::thread("loop", async { panic!("as asked") }).unwrap();
    assert_eq!(ended.await.unwrap(), Err("panicked: as asked".to_owned()));
}
