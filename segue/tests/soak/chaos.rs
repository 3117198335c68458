//! Nodes are killed, stopped and frozen at random while clients ask.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{self, Client, Mesh};
use crate::prompts::{ANSWER_TOKENS, Known, stable};
use crate::soak_time;

const CLIENTS: u64 = 8;
/// From one fault to the next.
const PEACE: Duration = Duration::from_secs(5);
/// A frozen node thaws after so long.
const FROST: Duration = Duration::from_secs(4);
/// An answer that takes longer counts as hanging.
const HANGS_AFTER: Duration = Duration::from_secs(120);

#[derive(Debug, Default)]
struct Tally {
    right: u32,
    /// What the client was told instead.
    refused: Vec<String>,
    wrong: Vec<String>,
    hung: u32,
    slowest: Duration,
}

#[tokio::test]
#[ignore = "takes minutes: make soak"]
async fn random_faults_cost_time_but_no_answer() {
    let _turn = harness::alone().await;
    let mesh = Mesh::start(&["--prefill-nodes", "2", "--decode-nodes", "2"]);
    let client = mesh.client();
    let known: Arc<[Known]> = stable(&client).await.into();
    println!("{} prompts with a stable answer", known.len());
    let over = Arc::new(AtomicBool::new(false));
    let mut clients = tokio::task::JoinSet::new();
    for number in 0..CLIENTS {
        clients.spawn(ask_until(over.clone(), client.clone(), known.clone(), StdRng::seed_from_u64(number)));
    }
    let faults = torment(&client, soak_time()).await;
    over.store(true, Relaxed);

    let mut total = Tally::default();
    while let Some(tally) = clients.join_next().await {
        let tally = tally.unwrap();
        total.right += tally.right;
        total.hung += tally.hung;
        total.refused.extend(tally.refused);
        total.wrong.extend(tally.wrong);
        total.slowest = total.slowest.max(tally.slowest);
    }
    let settled = client.settles(Duration::from_secs(20)).await;
    println!("{faults} faults; {total:#?}");
    assert!(settled, "{:#}", client.status().await);
    assert!(faults > 0 && total.right > 0);
    assert_eq!((total.hung, total.wrong.len()), (0, 0));
    let asked = total.right as usize + total.refused.len();
    assert!(total.refused.len() * 100 <= asked, "{} of {asked} refused", total.refused.len());
}

async fn ask_until(over: Arc<AtomicBool>, client: Client, known: Arc<[Known]>, mut random: StdRng) -> Tally {
    let mut tally = Tally::default();
    while !over.load(Relaxed) {
        let Known { prompt, answer } = &known[random.random_range(0..known.len())];
        let begin = Instant::now();
        match tokio::time::timeout(HANGS_AFTER, client.try_stream(prompt, ANSWER_TOKENS)).await {
            Err(_) => tally.hung += 1,
            Ok(Err(refusal)) => {
                tally.refused.push(refusal);
                // As a client that honours Retry-After.
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            Ok(Ok(stream)) if stream.is_whole() && stream.text == *answer => tally.right += 1,
            Ok(Ok(stream)) => tally.wrong.push(format!("{:?} instead of {answer:?}", stream)),
        }
        tally.slowest = tally.slowest.max(begin.elapsed());
    }
    tally
}

/// One fault after the other; the supervisor starts what died. Returns how many.
async fn torment(client: &Client, how_long: Duration) -> u32 {
    let end = Instant::now() + how_long;
    let mut random = StdRng::seed_from_u64(7);
    let mut faults = 0;
    while Instant::now() < end {
        tokio::time::sleep(PEACE).await;
        let pids = client.pids().await;
        if pids.is_empty() {
            continue;
        }
        let (name, pid) = &pids[random.random_range(0..pids.len())];
        let signal = [Signal::TERM, Signal::KILL, Signal::STOP][random.random_range(0..3)];
        println!("{signal:?} to {name}");
        let pid = Pid::from_raw(*pid as i32).unwrap();
        // It may have gone by itself since the status.
        if kill_process(pid, signal).is_ok() {
            faults += 1;
        }
        if signal == Signal::STOP {
            tokio::time::sleep(FROST).await;
            let _ = kill_process(pid, Signal::CONT);
        }
    }
    faults
}
