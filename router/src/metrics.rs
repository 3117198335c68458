//! What Prometheus sees: the router's own figures, and those that nodes report.
//!
//! Labels are chosen here: statuses, rule names, outcomes, node names. Nothing
//! that a client supplies becomes one.

use std::fmt::Write;
use std::time::{Duration, Instant};

use kv_transfer::Role;
use metrics::{Counter, Histogram, counter, histogram, with_local_recorder};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};

use crate::error::RouterError;
use crate::registry::Registry;

/// The router's own figures. No global recorder: several routers may live in
/// one process.
pub(crate) struct RouterMetrics {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    /// Request accepted → first token received from the decode node. Not counted:
    /// requests that end before it.
    pub(crate) ttft: Histogram,
    /// Gap between two arrivals of tokens of one answer. Not counted: the first.
    pub(crate) itl: Histogram,
    /// Prompt tokens of requests that were placed, once per prompt.
    pub(crate) prompt_tokens: Counter,
    /// Of those, the ones that nobody computed again.
    pub(crate) cached_tokens: Counter,
    /// Generated tokens, of cancelled and failed answers too.
    pub(crate) completion_tokens: Counter,
    /// Answers placed on a second decode node because the first one failed.
    pub(crate) replacements: Counter,
    /// Answers that the policy wanted prefilled remotely and that were not.
    pub(crate) fallbacks: Counter,
}

/// How a generation request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The whole answer was produced.
    Finished,
    /// Refused before anything was generated.
    Refused,
    /// Broke off.
    Failed,
    /// The client left.
    Cancelled,
}

impl Outcome {
    fn label(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// From a warm short prompt on a fast node to a cold 64K prompt on a small one.
const TTFT_SECONDS: [f64; 16] =
    [0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0];
/// From a small model's step to a stream that stalls.
const ITL_SECONDS: [f64; 13] = [0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 5.0];

impl RouterMetrics {
    pub(crate) fn new() -> Result<Self, RouterError> {
        let refused =
            |error: metrics_exporter_prometheus::BuildError| RouterError::Metrics(error.to_string());
        let buckets = |builder: PrometheusBuilder, name: &str, seconds: &[f64]| {
            builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), seconds).map_err(refused)
        };
        let builder = buckets(PrometheusBuilder::new(), TTFT, &TTFT_SECONDS)?;
        let recorder = buckets(builder, ITL, &ITL_SECONDS)?.build_recorder();
        let handle = recorder.handle();
        let histogram = |name: &'static str| with_local_recorder(&recorder, || histogram!(name));
        let counter = |name: &'static str| with_local_recorder(&recorder, || counter!(name));
        Ok(Self {
            ttft: histogram(TTFT),
            itl: histogram(ITL),
            prompt_tokens: counter("segue_router_prompt_tokens_total"),
            cached_tokens: counter("segue_router_cached_tokens_total"),
            completion_tokens: counter("segue_router_completion_tokens_total"),
            replacements: counter("segue_router_replacements_total"),
            fallbacks: counter("segue_router_prefill_fallbacks_total"),
            handle,
            recorder,
        })
    }

    /// One answered generation request, whatever the answer. `rule` is `none`
    /// where the request was refused before a decision.
    pub(crate) fn answered(&self, status: u16, rule: &'static str) {
        with_local_recorder(&self.recorder, || {
            counter!("segue_router_requests_total", "status" => status.to_string(), "rule" => rule)
                .increment(1);
        });
    }

    /// One generation request that is over.
    pub(crate) fn ended(&self, outcome: Outcome) {
        with_local_recorder(&self.recorder, || {
            counter!("segue_router_ended_total", "outcome" => outcome.label()).increment(1);
        });
    }

    /// Frees what histograms have collected; call it every few seconds.
    pub(crate) fn upkeep(&self) {
        self.handle.run_upkeep();
    }

    /// The page for Prometheus.
    pub(crate) fn render<L: Clone>(
        &self,
        now: Instant,
        in_flight: u64,
        registry: &std::sync::Mutex<Registry<L>>,
    ) -> String {
        let mut page = self.handle.render();
        let _ = writeln!(page, "# TYPE segue_router_requests_in_flight gauge");
        let _ = writeln!(page, "segue_router_requests_in_flight {in_flight}\n");
        page.push_str(&node_figures(now, &lock(registry)));
        page
    }
}

const TTFT: &str = "segue_router_ttft_seconds";
const ITL: &str = "segue_router_itl_seconds";

/// A poisoned lock means that a panic was caught elsewhere; the registry is
/// changed in single steps and stays usable.
pub(crate) fn lock<L>(registry: &std::sync::Mutex<L>) -> std::sync::MutexGuard<'_, L> {
    registry.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

type Figure = (&'static str, &'static str, fn(&kv_transfer::Status) -> f64);

/// Of every node: name after `segue_<role>_`, Prometheus type, value.
const FIGURES: &[Figure] = &[
    ("requests_in_flight", "gauge", |status| f64::from(status.requests_in_flight)),
    ("handoffs_active", "gauge", |status| f64::from(status.handoffs_active)),
    ("staged_bytes", "gauge", |status| status.staged_bytes as f64),
    ("queue_tokens", "gauge", |status| status.queue_tokens as f64),
    ("slots_used", "gauge", |status| f64::from(status.slots_used)),
    ("kv_used_tokens", "gauge", |status| status.kv_used_tokens as f64),
    ("kv_total_tokens", "gauge", |status| status.kv_total_tokens as f64),
    ("kv_used_ratio", "gauge", |status| {
        status.kv_used_tokens as f64 / (status.kv_total_tokens as f64).max(1.0)
    }),
    ("step_seconds_max", "gauge", |status| seconds(status.step_micros_max)),
    ("steps_total", "counter", |status| status.steps_total as f64),
    ("prefill_tokens_total", "counter", |status| status.prefill_tokens_total as f64),
    ("transfer_bytes_total", "counter", |status| status.transfer_bytes_total as f64),
    ("handoffs_completed_total", "counter", |status| status.handoffs_completed_total as f64),
    ("handoffs_failed_total", "counter", |status| status.handoffs_failed_total as f64),
];

/// Of decode nodes only.
const DECODE_FIGURES: &[Figure] = &[
    ("installed_tokens_total", "counter", |status| status.installed_tokens_total as f64),
    ("generated_tokens_total", "counter", |status| status.generated_tokens_total as f64),
    ("handoff_seconds_total", "counter", |status| seconds(status.handoff_micros_total)),
    ("handoff_tail_seconds_total", "counter", |status| seconds(status.handoff_tail_micros_total)),
    ("late_frames_total", "counter", |status| status.late_frames_total as f64),
];

fn seconds(micros: u64) -> f64 {
    Duration::from_micros(micros).as_secs_f64()
}

/// The last status of every node, in Prometheus' text format. Node names need no
/// escapes: certificates allow only letters, digits, `-`, `_` and `.`.
fn node_figures<L: Clone>(now: Instant, registry: &Registry<L>) -> String {
    let mut page = String::new();
    for role in [Role::Prefill, Role::Decode] {
        let nodes: Vec<_> = registry.nodes().filter(|node| node.role == role).collect();
        if nodes.is_empty() {
            continue;
        }
        let _ = writeln!(page, "# TYPE segue_{role}_healthy_ratio gauge");
        for node in &nodes {
            let healthy = u8::from(node.healthy(now));
            let _ = writeln!(page, "segue_{role}_healthy_ratio{{node=\"{}\"}} {healthy}", node.hello.name);
        }
        let more = if role == Role::Decode { DECODE_FIGURES } else { &[] };
        for (name, kind, value) in FIGURES.iter().chain(more) {
            let _ = writeln!(page, "# TYPE segue_{role}_{name} {kind}");
            for node in &nodes {
                let value = value(&node.status);
                let _ = writeln!(page, "segue_{role}_{name}{{node=\"{}\"}} {value}", node.hello.name);
            }
        }
    }
    page
}
