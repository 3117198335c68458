//! Bad links between the nodes. Ids are those of docs/faults.md.

use std::time::{Duration, Instant};

use engine::fake::FakeOptions;
use kv_transfer::PrefillCandidate;
use tokio::time::timeout;

use crate::harness::{Answer, Mesh, Node, PATIENCE, prompt, quick, request};
use crate::relay::{Relay, Road};

/// What a bad night of a wireless link looks like.
const BAD: Road = Road { lost: 50, delay: Duration::from_millis(5), jitter: Duration::from_millis(30) };

/// The prefill node as the decode node finds it behind the relay.
fn behind(relay: &Relay, prefill: &Node) -> PrefillCandidate {
    PrefillCandidate { address: relay.address.to_string(), ..prefill.candidate() }
}

// C2
#[tokio::test(flavor = "multi_thread")]
async fn loss_delay_and_reordering_change_no_answer() {
    let mut mesh = Mesh::new(quick()).await;
    let p = mesh.prefill(mesh.model.clone()).await;
    let d = mesh.decode(|_| ()).await;
    let relay = Relay::to(&p.hello.address, BAD).await;
    let mut inboxes = Vec::new();
    for index in 0..30 {
        let prompt = prompt(index, 300 + 20 * index);
        let (sender, inbox) = d.ask(&request(&prompt, vec![behind(&relay, &p)])).await;
        inboxes.push((prompt, sender, inbox));
    }
    for (prompt, _sender, inbox) in inboxes {
        let answer = timeout(Duration::from_secs(60), Answer::read(inbox)).await.expect("in time");
        let (_, by, reason, _) = answer.started.unwrap();
        assert_eq!((by.as_str(), reason.as_str()), ("prefill-1", ""));
        assert_eq!(answer.tokens, mesh.model.continuation(&prompt, 20));
    }
    let (passed, lost) = relay.counts();
    assert!(lost > 10, "{lost} of {passed} packets were lost: too few for this test");
    d.reports(|status| status.staged_bytes == 0 && status.handoffs_active == 0).await;
    p.reports(|status| status.staged_bytes == 0 && status.handoffs_active == 0).await;
}

// A1, B18
#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_is_cut_costs_time_and_is_used_again_when_it_heals() {
    let mut mesh = Mesh::new(FakeOptions { token_time: Duration::from_millis(1), ..quick() }).await;
    let p = mesh.prefill(mesh.model.clone()).await;
    let d = mesh.decode(|_| ()).await;
    let relay = Relay::to(&p.hello.address, Road::default()).await;
    let prompt_a = prompt(1, 1500);
    let (_sender, inbox) = d.ask(&request(&prompt_a, vec![behind(&relay, &p)])).await;
    d.reports(|status| status.staged_bytes > 0).await;
    relay.set(Road::CUT);
    let cut = Instant::now();
    let answer = timeout(PATIENCE, Answer::read(inbox)).await.expect("it goes on here");
    println!("answered {:?} after the cut", cut.elapsed());
    assert!(!answer.started.unwrap().2.is_empty(), "the fallback is told");
    assert_eq!(answer.tokens, mesh.model.continuation(&prompt_a, 20));
    d.reports(|status| status.staged_bytes == 0 && status.handoffs_active == 0).await;

    // A client that leaves while nothing gets through; by another road, which
    // no cut has slowed down.
    let second = Relay::to(&p.hello.address, Road::default()).await;
    let prompt_b = prompt(2, 1500);
    let (sender, inbox) = d.ask(&request(&prompt_b, vec![behind(&second, &p)])).await;
    d.reports(|status| status.staged_bytes > 0).await;
    second.set(Road::CUT);
    drop((sender, inbox));
    d.reports(|status| status.staged_bytes == 0 && status.requests_in_flight == 0).await;

    relay.set(Road::default());
    let healed = Instant::now();
    let mut remote = false;
    // The old connection has to be given up first.
    while !remote && healed.elapsed() < Duration::from_secs(30) {
        let prompt = prompt(3 + healed.elapsed().as_millis() as u32, 400);
        let answer = d.answer(&request(&prompt, vec![behind(&relay, &p)])).await;
        assert_eq!(answer.tokens, mesh.model.continuation(&prompt, 20));
        remote = answer.started.unwrap().1 == "prefill-1";
    }
    println!("used again {:?} after the link healed", healed.elapsed());
    assert!(remote, "the prefill node is not used again");
    p.reports(|status| status.staged_bytes == 0 && status.handoffs_active == 0).await;
}
