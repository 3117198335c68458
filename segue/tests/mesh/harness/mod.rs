//! Starts `segue up`, talks to it, and shows its log when a test fails.

mod client;
mod prompts;
mod twins;

pub(crate) use client::{Answer, Client, decode_node, nodes};
pub(crate) use prompts::{code_word, long_prompt};
pub(crate) use twins::{ANIMALS, twins, wrong_answers};

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::{Mutex as AsyncMutex, MutexGuard};

/// A running mesh. Dropping it stops it.
pub(crate) struct Mesh {
    process: Child,
    /// Closes when the test process ends in whatever way, and the mesh with it.
    _stdin: ChildStdin,
    url: String,
    log: Arc<Mutex<String>>,
}

/// The turn of one test, and the mesh that tests share.
pub(crate) type Turn = MutexGuard<'static, Option<Mesh>>;

static SHARED: AsyncMutex<Option<Mesh>> = AsyncMutex::const_new(None);

/// Waits for this test's turn; the mesh is started by the first one.
pub(crate) async fn shared() -> (Turn, Client) {
    let mut turn = SHARED.lock().await;
    let mesh = turn.get_or_insert_with(|| Mesh::start(&[]));
    let client = mesh.client();
    (turn, client)
}

/// Waits for this test's turn; for tests that start meshes of their own.
pub(crate) async fn alone() -> Turn {
    let mut turn = SHARED.lock().await;
    // Its own nodes would compete for the same processors.
    turn.take();
    turn
}

impl Mesh {
    /// Starts `segue up` on a free port and waits until it is ready.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        let mut process = up(arguments).spawn().expect("segue can be started");
        let log = collect(process.stderr.take().unwrap());
        let stdin = process.stdin.take().unwrap();
        let ready = first_line(process.stdout.take().unwrap());
        let line = ready.recv_timeout(Duration::from_secs(120)).unwrap_or_default();
        let Some(url) = line.strip_prefix("ready ") else {
            let _ = process.kill();
            panic!("segue up said {line:?} instead of ready; its log:\n{}", log.lock().unwrap());
        };
        Self { process, _stdin: stdin, url: url.to_owned(), log }
    }

    /// Something to send requests with.
    pub(crate) fn client(&self) -> Client {
        Client::new(&self.url)
    }

    /// Where it listens.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Everything the mesh logged so far.
    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// Process of `segue up`.
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.process)
    }

    /// Processes that `segue up` started and that live.
    pub(crate) fn children(&self) -> Vec<Pid> {
        children_of(self.process.id())
    }

    /// Process of the router: the only child that is no node.
    pub(crate) async fn router(&self) -> Pid {
        let nodes = self.client().pids().await;
        let is_node = |pid: &Pid| nodes.iter().any(|(_, node)| *node == pid.as_raw_nonzero().get() as u64);
        self.children().into_iter().find(|pid| !is_node(pid)).expect("the router runs")
    }

    /// Waits for the end of `segue up`.
    pub(crate) fn wait(&mut self, limit: Duration) -> Option<ExitStatus> {
        wait(&mut self.process, limit)
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            eprintln!("--- end of the log of segue up ---\n{}", &log[log.len().saturating_sub(8000)..]);
        }
        // Only a process that was not waited for still has its number.
        if matches!(self.process.try_wait(), Ok(None)) {
            let _ = kill_process(self.pid(), Signal::TERM);
        }
        if self.wait(Duration::from_secs(20)).is_none() {
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }
}

/// `segue up` on a free port with pipes everywhere; it ends with this process.
pub(crate) fn up(arguments: &[&str]) -> Command {
    let mut command = segue(&["up", "--listen", "127.0.0.1:0"]);
    command.args(arguments).env("SEGUE_SUPERVISED", "1");
    command
}

/// The binary under test with pipes everywhere.
pub(crate) fn segue(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_segue"));
    // Tests look into /proc/PID, which a process without core dumps closes to its own user.
    command.env("SEGUE_CORE_DUMPS", "1");
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs to the end; gives the status and what was written to stderr.
pub(crate) fn run(mut command: Command, limit: Duration) -> (ExitStatus, String) {
    let mut process = command.spawn().expect("segue can be started");
    let stdin = process.stdin.take();
    let log = collect(process.stderr.take().unwrap());
    let status = wait(&mut process, limit);
    drop(stdin);
    let Some(status) = status else {
        let _ = process.kill();
        panic!("still running after {limit:?}; its log:\n{}", log.lock().unwrap());
    };
    std::thread::sleep(Duration::from_millis(100));
    let log = log.lock().unwrap().clone();
    (status, log)
}

/// The same for a command that has to succeed.
pub(crate) fn run_well(arguments: &[&str]) {
    let (status, log) = run(segue(arguments), Duration::from_secs(10));
    assert!(status.success(), "{log}");
}

/// The demo model in the cache.
pub(crate) fn demo_model() -> PathBuf {
    let cache = std::env::var_os("SEGUE_CACHE").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").expect("HOME is set")).join(".cache/segue"),
        PathBuf::from,
    );
    cache.join("models/smollm2-135m-q8_0.gguf")
}

/// Waits until `holds` or the limit; says whether it held.
pub(crate) async fn eventually(limit: Duration, mut holds: impl AsyncFnMut() -> bool) -> bool {
    let end = now() + limit;
    while now() < end {
        if holds().await {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    false
}

/// Whether a process exists and is not just waiting to be reaped.
pub(crate) fn lives(pid: Pid) -> bool {
    std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or("").trim_start().starts_with('Z'))
}

/// Memory of a process that no file backs.
pub(crate) fn resident_kb(pid: Pid) -> i64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// The clock of tests.
pub(crate) fn now() -> Instant {
    Instant::now()
}

fn children_of(parent: u32) -> Vec<Pid> {
    let tasks = std::fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let numbers: Vec<i32> = lists
        .flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect();
    numbers.into_iter().filter_map(Pid::from_raw).collect()
}

fn wait(process: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let end = now() + limit;
    loop {
        if let Ok(Some(status)) = process.try_wait() {
            return Some(status);
        }
        if now() > end {
            return None;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn collect(mut from: impl Read + Send + 'static) -> Arc<Mutex<String>> {
    let log = Arc::new(Mutex::new(String::new()));
    let copy = log.clone();
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(read @ 1..) = from.read(&mut buffer) {
            copy.lock().unwrap().push_str(&String::from_utf8_lossy(&buffer[..read]));
        }
    });
    log
}

fn first_line(from: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut lines = BufReader::new(from).lines();
        if let Some(Ok(line)) = lines.next() {
            let _ = sender.send(line);
        }
        // Whatever else comes must not fill the pipe.
        for _ in lines {}
    });
    receiver
}
