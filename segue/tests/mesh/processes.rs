//! Starting and stopping: clear errors, and no process left behind.

use std::net::TcpListener;
use std::time::Duration;

use rustix::process::{Signal, kill_process};

use crate::harness::{self, Mesh, eventually, lives};

const SOON: Duration = Duration::from_secs(20);

#[tokio::test]
async fn busy_port_is_named() {
    let _turn = harness::alone().await;
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    fails_with(&["up", "--listen", &address], &address);
}

#[tokio::test]
async fn missing_model_is_named() {
    let _turn = harness::alone().await;
    fails_with(&["up", "--listen", "127.0.0.1:0", "--model", "/nonexistent/m.gguf"], "/nonexistent/m.gguf");
}

#[tokio::test]
async fn file_that_is_not_a_model_is_named() {
    let _turn = harness::alone().await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "not a model").unwrap();
    let path = file.path().to_str().unwrap();
    fails_with(&["up", "--listen", "127.0.0.1:0", "--model", path], path);
}

#[tokio::test]
async fn wrong_policy_is_refused_with_all_its_mistakes() {
    let _turn = harness::alone().await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "local_below_tokenz = 5\nlocal_below_tokens = -1\n").unwrap();
    let path = file.path().to_str().unwrap();
    let log = fails_with(&["up", "--listen", "127.0.0.1:0", "--policy", path], path);
    assert!(log.contains("local_below_token"), "{log}");
    fails_with(&["up", "--listen", "127.0.0.1:0", "--policy", "/nonexistent.toml"], "/nonexistent.toml");
}

#[tokio::test]
async fn wrong_configuration_key_is_named() {
    let _turn = harness::alone().await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "model = \"m.gguf\"\nslotz = 3\n").unwrap();
    let path = file.path().to_str().unwrap();
    for role in ["router", "prefill", "decode"] {
        fails_with(&[role, "--config", path], "slotz");
        fails_with(&[role, "--config", "/nonexistent.toml"], "/nonexistent.toml");
    }
}

#[tokio::test]
async fn interrupt_stops_every_process_and_is_a_success() {
    let _turn = harness::alone().await;
    let mut mesh = Mesh::start(&[]);
    let children = mesh.children();
    assert_eq!(children.len(), 3);
    kill_process(mesh.pid(), Signal::INT).unwrap();
    let status = mesh.wait(SOON).expect("it ends");
    assert!(status.success(), "{status}");
    assert!(children.iter().all(|&pid| !lives(pid)));
}

#[tokio::test]
async fn running_streams_finish_after_the_first_signal() {
    let _turn = harness::alone().await;
    let mut mesh = Mesh::start(&[]);
    let client = mesh.client();
    let stream = tokio::spawn(async move { client.stream("Tell me a long story about the sea.", 200).await });
    tokio::time::sleep(Duration::from_millis(500)).await;
    kill_process(mesh.pid(), Signal::TERM).unwrap();
    let stream = stream.await.unwrap();
    assert!(stream.is_whole(), "{stream:?}");
    assert!(mesh.wait(SOON).expect("it ends").success());
}

#[tokio::test]
async fn killed_supervisor_takes_its_children_along() {
    let _turn = harness::alone().await;
    let mut mesh = Mesh::start(&[]);
    let children = mesh.children();
    assert_eq!(children.len(), 3);
    kill_process(mesh.pid(), Signal::KILL).unwrap();
    mesh.wait(SOON).expect("it ends");
    let gone = eventually(Duration::from_secs(5), async || children.iter().all(|&pid| !lives(pid))).await;
    assert!(gone, "{children:?}");
}

/// Expects failure with one line on stderr that contains `named`; gives it back.
fn fails_with(arguments: &[&str], named: &str) -> String {
    let (status, log) = harness::run(harness::segue(arguments), SOON);
    assert!(!status.success(), "{arguments:?}: {log}");
    let reasons: Vec<&str> = log.lines().filter(|line| line.starts_with("segue: ")).collect();
    assert_eq!(reasons.len(), 1, "{arguments:?}: {log}");
    assert!(reasons[0].contains(named), "{arguments:?}: {log}");
    assert!(!log.contains("panicked"), "{arguments:?}: {log}");
    log
}
