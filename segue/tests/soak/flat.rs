//! Memory and descriptors after many requests.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::process::Pid;
use serde_json::json;

use crate::harness::{self, Client, Mesh, long_prompt, resident_kb};
use crate::soak_time;

const CLIENTS: u64 = 8;
/// Growth over the second half that is noise: caches of the allocator settle late.
const GROWTH_KB_MAX: i64 = 8 << 10;
/// Hashes of the blocks of a prompt of `strangers`, the least that an index keeps of it.
const PROMPT_BYTES_MAX: i64 = 600;
const SETTLE: Duration = Duration::from_secs(20);
/// What a node told the router is at most this old.
const STATUS: Duration = Duration::from_millis(500);

// L2, L4
#[tokio::test]
#[ignore = "takes minutes: make soak"]
async fn memory_and_descriptors_stay_flat_over_many_requests() {
    let _turn = harness::alone().await;
    let mesh = Mesh::start(&[]);
    let client = mesh.client();
    round(&client, Instant::now() + soak_time() / 4).await;
    let descriptors = each(&mesh, descriptors);
    let begin = Instant::now();
    let first = round(&client, begin + soak_time() * 3 / 8).await;
    let half = each(&mesh, resident_kb);
    let second = round(&client, begin + soak_time() * 3 / 4).await;
    assert!(client.settles(Duration::from_secs(20)).await, "{:#}", client.status().await);
    let end = each(&mesh, resident_kb);
    println!("{first} and {second} requests; resident kB at half time {half:?}, at the end {end:?}");
    for (half, end) in half.iter().zip(&end) {
        assert!(end - half < GROWTH_KB_MAX, "{half} kB at half time, {end} at the end");
    }
    let back = harness::eventually(Duration::from_secs(60), async || {
        each(&mesh, self::descriptors).iter().zip(&descriptors).all(|(now, then)| *now <= then + 10)
    });
    assert!(back.await, "{descriptors:?} before, {:?} after", each(&mesh, self::descriptors));
}

// H6
#[tokio::test]
#[ignore = "takes minutes: make soak"]
async fn two_hundred_prompts_with_a_shared_beginning_leave_nothing() {
    let (turn, client) = harness::shared().await;
    let mesh = turn.as_ref().unwrap();
    let beginning = long_prompt(950, 130);
    let ask = async |index: u32| {
        let answer = client.chat(&format!("{beginning} Note {index}. Name a colour."), 1, "remote").await;
        assert!(answer.route.starts_with("remote; "), "{answer:?}");
        answer
    };
    for index in 0..20 {
        ask(index).await;
    }
    assert!(client.settles(SETTLE).await);
    tokio::time::sleep(STATUS).await;
    let (before, installed) =
        (each(mesh, resident_kb), client.node_sum("decode", "installed_tokens_total").await);
    let mut tokens = 0;
    for index in 20..220 {
        let answer = ask(index).await;
        assert!(answer.cached_tokens() >= 128, "two blocks are shared: {answer:?}");
        tokens += answer.prompt_tokens() - 1;
    }
    assert!(client.settles(SETTLE).await, "{:#}", client.status().await);
    tokio::time::sleep(STATUS).await;
    assert_eq!(client.node_sum("decode", "installed_tokens_total").await - installed, tokens);
    let after = each(mesh, resident_kb);
    println!("{tokens} tokens installed; resident kB {before:?} before, {after:?} after");
    // The shared blocks alone, kept each time, would be 600 MB.
    for (before, after) in before.iter().zip(&after) {
        assert!(after - before < 4 * GROWTH_KB_MAX, "{before} kB before, {after} after");
    }
}

// L1
#[tokio::test]
#[ignore = "takes minutes: make soak"]
async fn the_router_keeps_nothing_of_prompts_that_never_come_again() {
    let _turn = harness::alone().await;
    let mesh = Mesh::start(&[]);
    let client = mesh.client();
    let router = mesh.router().await;
    let salts = AtomicU64::new(1 << 20);
    strangers(&client, &salts, Instant::now() + soak_time() / 4).await;
    let begin = Instant::now();
    strangers(&client, &salts, begin + soak_time() * 3 / 8).await;
    let (half, half_count) = (resident_kb(router), salts.load(Relaxed));
    strangers(&client, &salts, begin + soak_time() * 3 / 4).await;
    assert!(client.settles(SETTLE).await, "{:#}", client.status().await);
    let (end, count) = (resident_kb(router), salts.load(Relaxed) - half_count);
    println!("{count} prompts in the second half; resident kB at half time {half}, at the end {end}");
    assert!(
        (end - half) * 1024 < count as i64 * PROMPT_BYTES_MAX,
        "{half} kB at half time, {end} at the end"
    );
}

/// Different prompts of many blocks until `end`. Their clients leave once they are
/// placed: the router has done its part, and the nodes need not do theirs.
async fn strangers(client: &Client, salts: &AtomicU64, end: Instant) {
    let ask = async || {
        while Instant::now() < end {
            let prompt = long_prompt(salts.fetch_add(1, Relaxed), 1200);
            client.leave(&prompt, 1, Duration::from_millis(40)).await;
        }
    };
    tokio::join!(ask(), ask(), ask(), ask());
}

/// Requests of all kinds until `end`: 20 % leave, 10 % are invalid. Returns how many.
async fn round(client: &Client, end: Instant) -> u64 {
    let mut clients = tokio::task::JoinSet::new();
    for number in 0..CLIENTS {
        let client = client.clone();
        clients.spawn(async move {
            let mut count = 0;
            while Instant::now() < end {
                let prompt = format!("Note {number} {count}. Name a colour.");
                if count % 200 == 7 {
                    let long = long_prompt(1_000 * number + count, 560);
                    assert_eq!(client.chat(&long, 2, "remote").await.status, 200);
                }
                match count % 10 {
                    0 => {
                        let body =
                            json!({"messages": [{"role": "user", "content": prompt}], "max_tokens": -1});
                        assert_eq!(client.post("/v1/chat/completions", &body, "").await.status, 400);
                    }
                    1 | 2 => client.leave(&prompt, 64, Duration::from_millis(30)).await,
                    _ => assert_eq!(client.chat(&prompt, 2, "").await.status, 200),
                }
                count += 1;
            }
            count
        });
    }
    let mut total = 0;
    while let Some(count) = clients.join_next().await {
        total += count.unwrap();
    }
    total
}

fn each(mesh: &Mesh, figure: fn(Pid) -> i64) -> Vec<i64> {
    mesh.children().into_iter().map(figure).collect()
}

fn descriptors(pid: Pid) -> i64 {
    std::fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero())).unwrap().count() as i64
}
