//! A mesh over five hosts: network namespaces, joined by links whose bandwidth
//! is limited and that can be cut. Needs root; `make test-hosts` runs it.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "tests fail loudly and measure real time")]

#[allow(dead_code, unused_imports, reason = "each test binary uses its part")]
#[path = "../mesh/harness/mod.rs"]
mod harness;
mod namespaces;

use std::process::Child;
use std::time::{Duration, Instant};

use harness::{Client, decode_node, demo_model, eventually, long_prompt, nodes, run_well};
use namespaces::Hosts;

const SETTLE: Duration = Duration::from_secs(20);
/// What a node told the router is at most this old.
const STATUS: Duration = Duration::from_millis(500);
const QUESTION: &str = "What is the capital of France? One sentence.";

/// The router's host, then nodes by role.
const NAMES: [&str; 5] = ["router", "decode-1", "decode-2", "prefill-1", "prefill-2"];

/// A mesh with a process on each host; ends with the value.
struct Mesh {
    processes: Vec<Child>,
    hosts: Hosts,
    client: Client,
    _folder: tempfile::TempDir,
}

impl Mesh {
    async fn start() -> Self {
        let hosts = Hosts::new(&NAMES);
        let folder = tempfile::tempdir().unwrap();
        let keys = folder.path().join("keys");
        run_well(&["keys", "init", "--dir", keys.to_str().unwrap()]);
        let mut mesh = Self {
            processes: Vec::new(),
            client: Client::new(&format!("http://{}:8080", hosts.address("router"))),
            hosts,
            _folder: folder,
        };
        for name in NAMES {
            let role = name.split('-').next().unwrap();
            run_well(&["keys", "issue", "--dir", keys.to_str().unwrap(), "--name", name, "--role", role]);
            let (own, router) = (mesh.hosts.address(name), mesh.hosts.address("router"));
            let mut config = format!("name = \"{name}\"\nmodel = {:?}\nkeys_dir = {keys:?}\n", demo_model());
            config.push_str(&match role {
                "router" => format!(
                    "listen = \"{own}:8080\"\nmesh_listen = \"{own}:7000\"\nallow_route_override = true\n"
                ),
                _ => format!("listen = \"{own}:7001\"\nrouter = \"{router}:7000\"\nthreads = 1\n"),
            });
            let file = mesh._folder.path().join(format!("{name}.toml"));
            std::fs::write(&file, config).unwrap();
            let arguments = [role, "--config", file.to_str().unwrap()];
            let mut command = mesh.hosts.command(name, env!("CARGO_BIN_EXE_segue"), &arguments);
            mesh.processes.push(command.env("SEGUE_SUPERVISED", "1").spawn().unwrap());
        }
        let all_there = eventually(Duration::from_secs(60), async || mesh.healthy().await == NAMES.len() - 1);
        let all_there = all_there.await;
        let ends = mesh.processes.iter_mut().map(|process| process.try_wait().unwrap());
        let ends: Vec<_> = ends.zip(NAMES).filter(|(end, _)| end.is_some()).collect();
        assert!(all_there, "{} nodes are healthy; ended: {ends:?}", mesh.healthy().await);
        mesh
    }

    /// Nodes that the router takes for healthy.
    async fn healthy(&self) -> usize {
        let Some(status) = self.client.try_status().await else { return 0 };
        status["nodes"].as_array().unwrap().iter().filter(|node| node["healthy"] == true).count()
    }

    async fn heals(&self) {
        let healthy = eventually(Duration::from_secs(40), async || self.healthy().await == NAMES.len() - 1);
        assert!(healthy.await, "{:#}", self.client.status().await);
        assert!(self.client.settles(SETTLE).await, "{:#}", self.client.status().await);
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

#[tokio::test]
#[ignore = "needs root and network namespaces: make test-hosts"]
async fn a_mesh_over_five_hosts_keeps_its_promises_when_links_fail() {
    let mesh = Mesh::start().await;
    serves_by_both_routes(&mesh.client).await;
    link_of_a_prefill_node_is_cut(&mesh).await;
    link_of_a_decode_node_is_cut(&mesh).await;
    slow_links_are_used_well_and_waited_for(&mesh).await;
    client_leaves_during_a_slow_transfer(&mesh).await;
}

async fn serves_by_both_routes(client: &Client) {
    let short = client.chat(QUESTION, 24, "").await;
    assert!(short.text().contains("Paris") && short.route.starts_with("local; "), "{short:?}");
    let long = client.chat(&format!("{}\n{QUESTION}", long_prompt(701, 500)), 6, "").await;
    assert!(long.status == 200 && long.route.starts_with("remote; "), "{long:?}");
}

async fn link_of_a_prefill_node_is_cut(mesh: &Mesh) {
    let client = &mesh.client;
    let prompt = format!("{}\n{QUESTION}", long_prompt(702, 900));
    let request = tokio::spawn({
        let (client, prompt) = (client.clone(), prompt.clone());
        async move { client.stream(&prompt, 6).await }
    });
    let by_decode = client.node_sum("decode", "prefill_tokens_total").await;
    let mut busy = None;
    let computing = eventually(Duration::from_secs(10), async || {
        let status = client.status().await;
        let nodes = status["nodes"].as_array().unwrap().iter();
        busy = nodes
            .filter(|node| node["role"] == "prefill" && node["handoffs_active"] == 1)
            .map(|node| node["name"].as_str().unwrap().to_owned())
            .next();
        busy.is_some()
    });
    assert!(computing.await, "{:#}", client.status().await);
    let busy = busy.unwrap();
    mesh.hosts.cut(&busy);
    let cut = Instant::now();
    let answer = request.await.unwrap();
    println!("{busy} cut off: answered {:?} later", cut.elapsed());
    assert!(answer.is_whole(), "{answer:?}");
    mesh.hosts.heal(&busy);
    mesh.heals().await;
    // The other prefill node took over, not the decode node.
    assert!(client.node_sum("decode", "prefill_tokens_total").await - by_decode < 300);
    assert_eq!(answer.text, client.oracle(&prompt, 6).await.text);
}

async fn link_of_a_decode_node_is_cut(mesh: &Mesh) {
    let client = &mesh.client;
    let question = "Count from 1 to 60. Write one number per line and nothing else.";
    let oracle = client.oracle(question, 100).await;
    let mut stream = client.open(question, 100).await;
    while stream.so_far().tokens < 10 {
        assert!(stream.advance().await);
    }
    let name = decode_node(&stream.so_far().route).to_owned();
    mesh.hosts.cut(&name);
    let cut = Instant::now();
    let answer = stream.rest().await;
    println!("{name} cut off: answer complete {:?} later", cut.elapsed());
    assert!(answer.is_whole() && answer.text == oracle.text, "{answer:?}");
    mesh.hosts.heal(&name);
    mesh.heals().await;
}

/// Bits per second of a slow link.
const SLOW_BITS: u64 = 20_000_000;

fn limit_prefill_nodes(mesh: &Mesh) {
    for name in ["prefill-1", "prefill-2"] {
        mesh.hosts.limit(name, &format!("{SLOW_BITS}bit"));
    }
}

// L8
async fn slow_links_are_used_well_and_waited_for(mesh: &Mesh) {
    let client = &mesh.client;
    limit_prefill_nodes(mesh);
    tokio::time::sleep(STATUS).await;
    let counters = async || {
        let status = client.status().await;
        let decode = nodes(&status, "decode");
        ["handoffs_failed_total", "installed_tokens_total", "transfer_bytes_total", "handoff_micros_total"]
            .map(|field| decode.iter().map(|node| node[field].as_u64().unwrap()).sum::<u64>())
    };
    let before = counters().await;
    // Some 900 tokens of 23 kB: eight seconds at that rate, much longer than it
    // takes to compute them.
    let answer = client.chat(&format!("{}\n{QUESTION}", long_prompt(705, 800)), 6, "").await;
    assert!(answer.status == 200 && answer.route.starts_with("remote; "), "{answer:?}");
    tokio::time::sleep(STATUS).await;
    let after = counters().await;
    let [failed, installed, bytes, micros] = std::array::from_fn(|index| after[index] - before[index]);
    assert_eq!((failed, installed), (0, answer.prompt_tokens() - 1));
    let share = bytes as f64 * 8.0 / (micros as f64 * 1e-6) / SLOW_BITS as f64;
    println!("{bytes} bytes at {share:.2} of the rate of a slow link");
    // Computing the first chunk is in that time, on whatever machine.
    assert!(share > 0.4, "{share:.2} of the rate");
}

// A5
async fn client_leaves_during_a_slow_transfer(mesh: &Mesh) {
    let client = &mesh.client;
    limit_prefill_nodes(mesh);
    // Some 700 tokens of 23 kB: six seconds at that rate.
    let leaving = tokio::spawn({
        let client = client.clone();
        async move { client.leave(&long_prompt(703, 600), 4, Duration::from_secs(5)).await }
    });
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(client.status().await["handoffs_active"], 1);
    leaving.await.unwrap();
    assert!(client.settles(Duration::from_secs(3)).await, "{:#}", client.status().await);
    let begin = Instant::now();
    let short = client.chat(QUESTION, 24, "").await;
    assert!(short.text().contains("Paris"));
    println!("a short one right after it: {:?}", begin.elapsed());
    let long = client.chat(&format!("{}\n{QUESTION}", long_prompt(704, 500)), 6, "").await;
    assert!(long.status == 200 && long.route.starts_with("remote; "), "{long:?}");
    assert!(client.settles(SETTLE).await, "{:#}", client.status().await);
}
