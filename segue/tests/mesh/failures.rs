//! Nodes that die, hang or do not belong here.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{self, Mesh, eventually, long_prompt};

#[tokio::test]
async fn prefill_node_that_dies_at_work_costs_time_but_no_answer() {
    let _turn = harness::alone().await;
    let mesh = Mesh::start(&[]);
    let client = mesh.client();
    let request = tokio::spawn({
        let client = client.clone();
        async move { client.chat(&long_prompt(41, 2500), 8, "").await }
    });
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert!(!request.is_finished());
    let victim = client.pid("prefill-1").await;
    kill_process(victim, Signal::KILL).unwrap();
    let answer = request.await.unwrap();
    assert!(!answer.text().is_empty());
    assert!(client.settles(Duration::from_secs(5)).await, "{:#}", client.status().await);

    // The supervisor starts it again, and it finds its way back by itself.
    assert!(client.sees_another("prefill-1", victim).await, "{:#}", client.status().await);
    let answer = client.chat(&long_prompt(42, 700), 4, "").await;
    assert!(answer.route.starts_with("remote; "), "{}", answer.route);
    assert_eq!(answer.status, 200);
    assert!(mesh.log().contains("prefill-1 stopped: signal: 9"), "{}", mesh.log());
}

#[tokio::test]
async fn router_that_dies_comes_back_and_nodes_register_again() {
    let _turn = harness::alone().await;
    let mesh = Mesh::start(&[]);
    let client = mesh.client();
    kill_process(mesh.router().await, Signal::KILL).unwrap();
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let url = format!("{}/health/ready", mesh.url());
    tokio::time::sleep(Duration::from_millis(300)).await;
    let back = eventually(Duration::from_secs(20), async || {
        http.get(&url).send().await.is_ok_and(|response| response.status().is_success())
    });
    assert!(back.await);
    assert!(client.sees_healthy("prefill-1").await, "{:#}", client.status().await);
    assert_eq!(client.chat("Hello", 4, "").await.status, 200);
    let answer = client.chat(&long_prompt(43, 700), 4, "").await;
    assert!(answer.route.starts_with("remote; "), "{}", answer.route);
}

#[tokio::test]
async fn node_of_another_authority_stays_outside() {
    let _turn = harness::alone().await;
    let data = tempfile::tempdir().unwrap();
    let keys = data.path().join("other-keys");
    let directory = data.path().to_str().unwrap();
    let mesh = Mesh::start(&["--data-dir", directory]);
    let client = mesh.client();
    let other = keys.to_str().unwrap();
    for arguments in [
        vec!["keys", "init", "--dir", other],
        vec!["keys", "issue", "--dir", other, "--name", "stranger", "--role", "prefill"],
    ] {
        let (status, log) = harness::run(harness::segue(&arguments), Duration::from_secs(10));
        assert!(status.success(), "{log}");
    }
    let own = std::fs::read_to_string(data.path().join("run/prefill-1.toml")).unwrap();
    let config = data.path().join("stranger.toml");
    let mesh_keys = data.path().canonicalize().unwrap().join("keys");
    let text = own.replace("prefill-1", "stranger").replace(mesh_keys.to_str().unwrap(), other);
    // The port is taken.
    let listen = own.lines().find(|line| line.starts_with("listen = ")).unwrap();
    let text = text.replace(listen, "listen = \"127.0.0.1:0\"");
    assert_ne!(text, own);
    std::fs::write(&config, text).unwrap();
    let mut command = harness::segue(&["prefill", "--config", config.to_str().unwrap()]);
    let mut stranger = command.env("SEGUE_SUPERVISED", "1").spawn().unwrap();

    tokio::time::sleep(Duration::from_secs(5)).await;
    let names: Vec<String> = client.pids().await.into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["decode-1", "prefill-1"]);
    assert!(stranger.try_wait().unwrap().is_none(), "it keeps trying");
    let answer = client.chat(&long_prompt(44, 700), 4, "").await;
    assert_eq!(answer.status, 200);
    assert!(answer.route.contains("prefill=prefill-1"), "{}", answer.route);
    kill_process(Pid::from_child(&stranger), Signal::KILL).unwrap();
    stranger.wait().unwrap();
}
