//! KV that arrives in part, again and again.

use std::net::{TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::harness::{self, Client, demo_model, long_prompt, resident_kb, run_well};

const LOADS: u64 = 50;
const SETTLE: Duration = Duration::from_secs(30);
/// What a node told the router is at most this old.
const STATUS: Duration = Duration::from_millis(500);
const CAPITAL: &str = "What is the capital of France? Answer with one word.";

/// Growth that is noise. The KV of one prompt is 12 MB, of all 600 MB.
const GROWTH_KB_MAX: i64 = 64 << 10;

/// Processes that nobody starts again but the test: `segue up` would wait longer
/// from death to death.
struct Parts {
    folder: tempfile::TempDir,
    processes: Vec<(&'static str, Child)>,
    client: Client,
}

impl Parts {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let keys = folder.path().join("keys");
        run_well(&["keys", "init", "--dir", keys.to_str().unwrap()]);
        let (http, mesh) = (free_tcp(), free_udp());
        let client = Client::new(&format!("http://{http}"));
        let mut parts = Self { folder, processes: Vec::new(), client };
        parts.add(
            "router",
            &keys,
            &format!("listen = \"{http}\"\nmesh_listen = \"{mesh}\"\nallow_route_override = true\n"),
        );
        let node =
            |more: &str| format!("listen = \"{}\"\nrouter = \"{mesh}\"\nthreads = 1\n{more}", free_udp());
        // Two slots: a canary gets one that a failed load had.
        parts.add("decode", &keys, &node("slots = 2\n"));
        parts.add("prefill", &keys, &node("chunk_tokens = 64\n"));
        assert!(parts.client.sees_all_healthy(2).await);
        parts
    }

    /// Writes the configuration of a role and starts it.
    fn add(&mut self, role: &'static str, keys: &Path, rest: &str) {
        run_well(&["keys", "issue", "--dir", keys.to_str().unwrap(), "--name", role, "--role", role]);
        let head = format!("name = \"{role}\"\nmodel = {:?}\nkeys_dir = {keys:?}\n", demo_model());
        std::fs::write(self.config(role), head + rest).unwrap();
        self.spawn(role);
    }

    fn spawn(&mut self, role: &'static str) {
        let config = self.config(role);
        let mut command = harness::segue(&[role, "--config", config.to_str().unwrap()]);
        command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        self.processes.push((role, command.env("SEGUE_SUPERVISED", "1").spawn().unwrap()));
    }

    fn kill(&mut self, role: &str) {
        let at = self.processes.iter().position(|(name, _)| *name == role).unwrap();
        let (_, mut process) = self.processes.remove(at);
        process.kill().unwrap();
        process.wait().unwrap();
    }

    fn config(&self, role: &str) -> PathBuf {
        self.folder.path().join(format!("{role}.toml"))
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        for (_, process) in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

// C11
#[tokio::test]
#[ignore = "takes minutes: make soak"]
async fn fifty_loads_that_fail_leave_nothing() {
    let _turn = harness::alone().await;
    let mut parts = Parts::start().await;
    let client = parts.client.clone();
    let canary = canary(&client).await;
    assert!(canary.contains("Paris"), "{canary}");
    let decode = client.pid("decode").await;
    let mut random = StdRng::seed_from_u64(11);
    let (mut memory, mut failed, mut load) = (0, 0, 0);
    while failed < LOADS {
        load += 1;
        assert!(load < 4 * LOADS, "only {failed} of {load} loads failed");
        let victim = client.pid("prefill").await;
        let request = tokio::spawn({
            let client = client.clone();
            async move { client.chat(&format!("{}\n{CAPITAL}", long_prompt(1100 + load, 450)), 8, "remote").await }
        });
        // At any point of it.
        tokio::time::sleep(Duration::from_millis(random.random_range(50..800))).await;
        parts.kill("prefill");
        parts.spawn("prefill");
        let answer = request.await.unwrap();
        assert!(answer.text().contains("Paris"), "load {load}: {answer:?}");
        assert!(client.settles(SETTLE).await, "{:#}", client.status().await);
        assert_eq!(self::canary(&client).await, canary, "after load {load}");
        assert!(client.sees_another("prefill", victim).await, "{:#}", client.status().await);
        if failed < LOADS / 5 {
            memory = resident_kb(decode);
        }
        failed = client.node_sum("decode", "handoffs_failed_total").await;
    }
    let end = resident_kb(decode);
    let parts_kept = client.node_sum("decode", "installed_tokens_total").await;
    println!(
        "{failed} of {load} loads failed and left {parts_kept} tokens to go on from; \
         resident kB after a fifth {memory}, at the end {end}"
    );
    assert!(parts_kept > 0, "nothing had arrived when they failed");
    assert_eq!(client.pid("decode").await, decode, "it never died");
    assert!(end - memory < GROWTH_KB_MAX, "{memory} kB after a fifth, {end} at the end");
    // And one that is not disturbed arrives whole.
    tokio::time::sleep(STATUS).await;
    let installed = client.node_sum("decode", "installed_tokens_total").await;
    let whole = client.cold(&long_prompt(1098, 450), 4, "remote").await;
    assert!(whole.route.starts_with("remote; "), "{whole:?}");
    tokio::time::sleep(STATUS).await;
    let more = client.node_sum("decode", "installed_tokens_total").await - installed;
    assert_eq!(more, whole.prompt_tokens() - 1);
}

/// What an undisturbed model says, with nothing that is there already.
async fn canary(client: &Client) -> String {
    let answer = client.cold(&format!("{}\n{CAPITAL}", long_prompt(1099, 100)), 12, "local").await;
    answer.text().to_owned()
}

fn free_tcp() -> std::net::SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

fn free_udp() -> std::net::SocketAddr {
    UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}
