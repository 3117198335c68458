//! One child process, kept running until the mesh stops.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kv_transfer::Shutdown;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use crate::logging::{self, FATAL_PREFIX};
use crate::signals::{self, SUPERVISED_VARIABLE};

/// What to start, under which name.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    /// Name in logs and in the mesh.
    pub(super) name: String,
    /// Subcommand of this binary.
    pub(super) role: &'static str,
    /// Its configuration file.
    pub(super) config: PathBuf,
}

/// A child ended although nobody asked it to.
#[derive(Debug)]
pub(super) struct Exit {
    name: String,
    status: String,
    reason: Option<String>,
}

impl fmt::Display for Exit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.reason {
            Some(reason) => write!(formatter, "{} stopped: {reason}", self.name),
            None => write!(formatter, "{} stopped: {}", self.name, self.status),
        }
    }
}

/// Wait before the first restart, doubled for each further one ...
const RESTART_DELAY: Duration = Duration::from_millis(250);
/// ... up to this ...
const RESTART_DELAY_MAX: Duration = Duration::from_secs(30);
/// ... until a child has lived this long, which shows that it can.
const STABLE_AFTER: Duration = Duration::from_secs(10);

/// Starts the child again whenever it ends, until `stop` says otherwise.
pub(super) async fn keep_running(spec: Spec, mut stop: watch::Receiver<Shutdown>, exits: mpsc::Sender<Exit>) {
    let mut delay = RESTART_DELAY;
    while *stop.borrow() == Shutdown::Running {
        let stable = tokio::time::sleep(STABLE_AFTER);
        tokio::pin!(stable);
        let Some(exit) = run_once(&spec, &mut stop).await else { return };
        if stable.is_elapsed() {
            delay = RESTART_DELAY;
        }
        // Full or closed means that nobody reads any more: the mesh is stopping.
        let _ = exits.try_send(exit);
        let pause = tokio::time::timeout(delay, signals::stopping(&mut stop));
        if pause.await.is_ok() {
            return;
        }
        delay = (delay * 2).min(RESTART_DELAY_MAX);
    }
}

/// `None` if the child ended because it was told to.
async fn run_once(spec: &Spec, stop: &mut watch::Receiver<Shutdown>) -> Option<Exit> {
    let failed =
        |reason: String| Exit { name: spec.name.clone(), status: String::new(), reason: Some(reason) };
    let mut child = match start(spec) {
        Ok(child) => child,
        Err(error) => return Some(failed(format!("cannot be started: {error}"))),
    };
    let fatal = Arc::new(Mutex::new(None));
    // Taken, because waiting for a child closes the stdin that it still holds.
    let _lifeline = child.stdin.take();
    let log = child.stderr.take().map(|stderr| forward(spec.name.clone(), stderr, fatal.clone()));
    let ended = tokio::select! {
        status = child.wait() => Some(describe(status)),
        () = signals::stopping(stop) => None,
    };
    if ended.is_none() {
        end(&mut child, stop).await;
    }
    end_of_log(log).await;
    let reason = fatal.lock().unwrap_or_else(PoisonError::into_inner).take();
    Some(Exit { name: spec.name.clone(), status: ended?, reason })
}

fn start(spec: &Spec) -> std::io::Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args([OsString::from(spec.role), "--config".into(), spec.config.clone().into()])
        .env(SUPERVISED_VARIABLE, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        // Ctrl-C goes to the terminal's foreground group: only this process
        // should hear it, and then tell the children once.
        .process_group(0)
        .kill_on_drop(true);
    if !logging::chosen_by_user() {
        command.env(logging::LOG_VARIABLE, "warn");
    }
    command.spawn()
}

/// SIGTERM first; SIGKILL when `stop` says now.
async fn end(child: &mut Child, stop: &mut watch::Receiver<Shutdown>) {
    if let Some(pid) = child.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
        // The only error is that it has just ended, which `wait` then sees.
        let _ = kill_process(pid, Signal::TERM);
    }
    let ended = tokio::select! {
        _ = child.wait() => true,
        _ = stop.wait_for(|state| *state == Shutdown::Now) => false,
    };
    if !ended {
        let _ = child.kill().await;
    }
}

/// Copies the child's log to stderr with its name in front. The line with
/// which it gives up is kept instead: whoever learns of the exit says it once.
fn forward(
    name: String,
    stderr: impl AsyncRead + Unpin + Send + 'static,
    fatal: Arc<Mutex<Option<String>>>,
) -> JoinHandle<()> {
    #[expect(clippy::disallowed_methods, reason = "the shell of the process")]
    tokio::spawn(async move {
        let mut reader = BufReader::new(stderr);
        let mut line = Vec::new();
        while matches!(reader.read_until(b'\n', &mut line).await, Ok(read) if read > 0) {
            let text = String::from_utf8_lossy(&line);
            match text.trim_end().strip_prefix(FATAL_PREFIX) {
                Some(reason) => {
                    *fatal.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason.to_owned())
                }
                None => eprintln!("{name} | {}", text.trim_end()),
            }
            line.clear();
        }
    })
}

/// The last lines are still in the pipe when the child is gone. A grandchild
/// could hold it open for ever, so the wait is short.
async fn end_of_log(log: Option<JoinHandle<()>>) {
    if let Some(log) = log {
        let _ = tokio::time::timeout(Duration::from_millis(500), log).await;
    }
}

fn describe(status: std::io::Result<ExitStatus>) -> String {
    status.map_or_else(|error| error.to_string(), |status| status.to_string())
}
