//! Does to the mesh what its mix says, at moments that the seed says.

use std::sync::Arc;
use std::time::Duration;

use engine::fake::Failure;
use kv_transfer::Shutdown;
use rand::Rng;
use rand::rngs::SmallRng;
use tokio::time::sleep;

use crate::checker::Checker;
use crate::mesh::{Mesh, Place};
use crate::mix::{Fault, Mix, WEATHERS};

/// Longest time from one fault to the next.
const PAUSE_MAX_MS: u64 = 2_500;
/// A node that was told to stop must have ended by then: its drain time and more.
const STOP_WITHIN: Duration = Duration::from_secs(10);
/// After the second order.
const STOP_NOW_WITHIN: Duration = Duration::from_secs(4);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Causes one fault after the other until dropped; [`heal`] repairs what is left.
pub(crate) async fn disturb(mesh: Arc<Mesh>, mix: Mix, mut rng: SmallRng, checker: Arc<Checker>) {
    let faults = mix.faults();
    loop {
        sleep(Duration::from_millis(rng.random_range(50..PAUSE_MAX_MS))).await;
        let fault = faults[rng.random_range(0..faults.len())];
        let node = &mesh.nodes()[rng.random_range(0..mesh.nodes().len())];
        // Short ones are forgiven, long ones are noticed and acted upon.
        let longest = if rng.random_bool(0.3) { 15_000 } else { 1_500 };
        let length = Duration::from_millis(rng.random_range(20..longest));
        let place = match fault {
            Fault::KillRouter => mesh.router(),
            Fault::Freeze => &mesh.places[rng.random_range(0..mesh.places.len())],
            _ => node,
        };
        let Some(_claim) = place.claim() else { continue };
        checker.note(format!("{fault:?} {} for {length:?}", place.name));
        strike(&mesh, fault, place, length, &mut rng, &checker).await;
    }
}

async fn strike(
    mesh: &Mesh,
    fault: Fault,
    place: &Place,
    length: Duration,
    rng: &mut SmallRng,
    checker: &Checker,
) {
    match fault {
        Fault::Weather => {
            mesh.network.set_weather(WEATHERS[rng.random_range(0..WEATHERS.len())]);
            sleep(length).await;
        }
        Fault::Cut => {
            let others: Vec<_> = mesh.places.iter().filter(|other| other.ip != place.ip).collect();
            let other = others[rng.random_range(0..others.len())];
            let (there, back) = (rng.random_bool(0.8), rng.random_bool(0.8));
            checker.note(format!("  between {} and {}: {there}, {back}", place.name, other.name));
            if there {
                mesh.network.cut(place.ip, other.ip);
            }
            if back {
                mesh.network.cut(other.ip, place.ip);
            }
            sleep(length).await;
            mesh.network.mend_between(place.ip, other.ip);
        }
        Fault::Kill | Fault::KillRouter => {
            mesh.kill(place);
            sleep(length).await;
            mesh.start(place);
        }
        Fault::Stop => {
            place.order(Shutdown::Draining);
            let urgent = rng.random_bool(0.3);
            if urgent {
                sleep(length.min(STOP_WITHIN / 4)).await;
                place.order(Shutdown::Now);
            }
            let within = if urgent { STOP_NOW_WITHIN } else { STOP_WITHIN };
            let ended = async {
                while place.is_alive() {
                    sleep(LOOK_EVERY).await;
                }
            };
            if tokio::time::timeout(within, ended).await.is_err() {
                checker.violation(format!("{} did not stop within {within:?}", place.name));
            }
            mesh.kill(place);
            sleep(length).await;
            mesh.start(place);
        }
        Fault::Freeze | Fault::FreezeEngine => {
            if let Some(machine) = place.machine() {
                match fault {
                    Fault::Freeze => machine.freeze(),
                    _ => machine.freeze_engine(),
                }
                sleep(length).await;
                machine.thaw();
            }
        }
        Fault::EngineError => {
            let failures = [Failure::Step, Failure::Export, Failure::Install];
            if let Some(model) = place.model() {
                model.fail_next(failures[rng.random_range(0..failures.len())], rng.random_range(1..3));
            }
        }
    }
}

/// Leaves a whole mesh behind, whatever was being done to it.
pub(crate) fn heal(mesh: &Mesh) {
    mesh.network.set_weather(WEATHERS[0]);
    mesh.network.mend();
    for place in &mesh.places {
        if let Some(machine) = place.machine() {
            machine.thaw();
        }
        if let Some(model) = place.model() {
            for failure in [Failure::Step, Failure::Export, Failure::Install] {
                model.fail_next(failure, 0);
            }
        }
    }
}

/// Starts again what has ended or is about to.
pub(crate) fn restart(mesh: &Mesh) {
    for place in mesh.places.iter().filter(|place| !place.is_alive()) {
        mesh.kill(place);
        mesh.start(place);
    }
}
