//! What must hold, and what was seen to break.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::mesh::{Mesh, SLOTS};
use crate::mix::Allowed;
use crate::now;

/// How one request ended, as its client saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// With the right answer.
    Right,
    /// An invalid request, with a status that says so.
    Refused(u16),
    /// With 503 at once.
    Busy(String),
    /// With another error, or one in the stream.
    Failed(String),
    /// The client left; what it had was right.
    Left,
    /// The router was not there, or died.
    RouterLost,
    /// In a way that must never be.
    Wrong(String),
}

/// Collects what a run's clients and probes see.
pub(crate) struct Checker {
    began: Instant,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    counts: BTreeMap<&'static str, u64>,
    seconds: Vec<f32>,
    violations: Vec<String>,
    trace: blake3::Hasher,
    log: Option<Vec<String>>,
}

/// What a run came to.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// Requests by how they ended.
    pub counts: BTreeMap<&'static str, u64>,
    /// How long each right answer took, in seconds of virtual time.
    pub seconds: Vec<f32>,
    /// What must not be.
    pub violations: Vec<String>,
    /// Equal for equal runs: every end of a request with its moment.
    pub digest: String,
    /// The trace itself, if asked for.
    pub log: Vec<String>,
}

/// More say nothing new.
const VIOLATIONS_MAX: usize = 20;

impl Checker {
    /// `logged`: whether the trace is kept.
    pub(crate) fn new(now: Instant, logged: bool) -> Self {
        let state = State { log: logged.then(Vec::new), ..State::default() };
        Self { began: now, state: Mutex::new(state) }
    }

    /// A request ended.
    pub(crate) fn ended(&self, number: usize, ended: Ended, took: Duration, allowed: Allowed) {
        let name = match &ended {
            Ended::Right => "right",
            Ended::Refused(_) => "refused",
            Ended::Busy(_) => "busy",
            Ended::Failed(_) => "failed",
            Ended::Left => "left",
            Ended::RouterLost => "router lost",
            Ended::Wrong(_) => "wrong",
        };
        let mut state = self.state();
        *state.counts.entry(name).or_default() += 1;
        if ended == Ended::Right {
            state.seconds.push(took.as_secs_f32());
        }
        drop(state);
        self.note(format!("request {number} after {:.3} s: {ended:?}", took.as_secs_f64()));
        match ended {
            Ended::Wrong(reason) => self.violation(format!("request {number}: {reason}")),
            Ended::Busy(reason) if !allowed.refusals => {
                self.violation(format!("request {number} was refused though nothing was wrong: {reason}"));
            }
            Ended::Failed(reason) if !allowed.errors => {
                self.violation(format!("request {number} failed though nothing was wrong: {reason}"));
            }
            Ended::RouterLost if !allowed.router_lost => {
                self.violation(format!("request {number} was cut off by a router that lives"));
            }
            _ => {}
        }
    }

    /// Adds to the trace.
    pub(crate) fn note(&self, event: String) {
        let line = format!("{:>9.3} s  {event}", self.age());
        let mut state = self.state();
        state.trace.update(line.as_bytes());
        if let Some(log) = &mut state.log {
            log.push(line);
        }
    }

    /// Something that must not be.
    pub(crate) fn violation(&self, what: String) {
        self.note(format!("VIOLATION {what}"));
        let line = format!("{:.3} s: {what}", self.age());
        let mut state = self.state();
        if state.violations.len() < VIOLATIONS_MAX {
            state.violations.push(line);
        }
    }

    /// Checks `/mesh/status` against the bounds that hold at every moment.
    pub(crate) fn check_bounds(&self, mesh: &Mesh, status: &Value) {
        for node in nodes(status) {
            let name = node["name"].as_str().unwrap_or("?");
            let figure = |key: &str| node[key].as_u64().unwrap_or(u64::MAX);
            let Some(place) = mesh.nodes().iter().find(|place| place.name == name) else {
                self.violation(format!("a node that is not of this mesh: {name}"));
                continue;
            };
            let handoffs = figure("handoffs_active");
            let bounds = [
                ("staged_bytes", mesh.staged_bytes_max(place.role, handoffs)),
                ("slots_used", SLOTS as u64),
                ("kv_used_tokens", figure("kv_total_tokens")),
                ("requests_in_flight", mesh.requests_max(place.role)),
                ("handoffs_active", mesh.requests_max(place.role)),
                ("queue_tokens", mesh.queue_tokens_max(place.role)),
            ];
            for (key, most) in bounds {
                if figure(key) > most {
                    self.violation(format!("{key} of {name} is {}, at most {most}", figure(key)));
                }
            }
        }
    }

    /// What is left of a mesh that has nothing to do; empty if nothing is.
    pub(crate) fn leftovers(&self, mesh: &Mesh, status: &Value) -> String {
        let mut left = Vec::new();
        for key in ["requests_in_flight", "handoffs_active", "staged_bytes", "slots_used"] {
            if status[key].as_u64() != Some(0) {
                left.push(format!("{key} {}", status[key]));
            }
        }
        for node in nodes(status) {
            let name = node["name"].as_str().unwrap_or("?");
            if node["healthy"] != true || node["draining"] != false {
                left.push(format!("{name} is not ready"));
            }
            for key in ["requests_in_flight", "handoffs_active", "staged_bytes", "slots_used", "queue_tokens"]
            {
                if node[key].as_u64() != Some(0) {
                    left.push(format!("{key} {} of {name}", node[key]));
                }
            }
        }
        if nodes(status).count() != mesh.nodes().len() {
            left.push(format!("{} of {} nodes", nodes(status).count(), mesh.nodes().len()));
        }
        left.join(", ")
    }

    /// The result.
    pub(crate) fn findings(&self) -> Findings {
        let state = self.state();
        Findings {
            counts: state.counts.clone(),
            seconds: state.seconds.clone(),
            violations: state.violations.clone(),
            digest: state.trace.finalize().to_hex()[..16].to_owned(),
            log: state.log.clone().unwrap_or_default(),
        }
    }

    fn age(&self) -> f64 {
        now().saturating_duration_since(self.began).as_secs_f64()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn nodes(status: &Value) -> impl Iterator<Item = &Value> {
    status["nodes"].as_array().into_iter().flatten()
}
