//! Memory and descriptors after many requests.

use std::time::{Duration, Instant};

use rustix::process::Pid;
use serde_json::json;

use crate::harness::{self, Client, Mesh, long_prompt, resident_kb};
use crate::soak_time;

const CLIENTS: u64 = 8;
/// Growth over the second half that is noise: caches of the allocator settle late.
const GROWTH_KB_MAX: i64 = 8 << 10;

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
