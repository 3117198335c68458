//! Keeps what was measured and writes the evidence: a row per request as it ends, the rest at the end.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use serde::Serialize;
use serde_json::{Value, json};

use crate::date;
use crate::estimate::{Estimate, Invalid, Repetition};
use crate::inverse_arrival::InverseArrivalArgs;
use crate::report;
use crate::schedule::Arm;
use crate::stats::Spread;
use crate::timeline::Timeline;

/// The circumstances of a run.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct About {
    pub(crate) tool: String,
    pub(crate) date: String,
    pub(crate) command_line: String,
    pub(crate) url: String,
    pub(crate) model: String,
    /// What the server says about itself.
    pub(crate) server: Value,
    pub(crate) host: Host,
    pub(crate) seed: u64,
    pub(crate) parameters: Parameters,
    pub(crate) notes: BTreeMap<String, String>,
}

/// Where the client ran.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Host {
    pub(crate) cpus: usize,
    pub(crate) system: String,
}

/// The options that shape the numbers.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Parameters {
    pub(crate) long_tokens: usize,
    pub(crate) longs: usize,
    pub(crate) offset_s: f64,
    pub(crate) reps: usize,
    pub(crate) idle_shorts: usize,
    pub(crate) stream_peer: bool,
    pub(crate) peer_max_tokens: u32,
    pub(crate) short_max_tokens: u32,
    pub(crate) long_max_tokens: u32,
    pub(crate) extra_body: Option<String>,
}

impl About {
    pub(crate) fn new(
        args: &InverseArrivalArgs,
        model: &str,
        seed: u64,
        since_1970_s: u64,
        server: Value,
    ) -> anyhow::Result<Self> {
        let system = format!("{} {}", std::env::consts::OS, std::env::consts::ARCH);
        Ok(Self {
            tool: format!("segue bench inverse-arrival {}", env!("CARGO_PKG_VERSION")),
            date: date::utc(since_1970_s),
            command_line: command_line(std::env::args(), args.api_key.as_deref()),
            url: args.url.clone(),
            model: model.to_owned(),
            server,
            host: Host { cpus: std::thread::available_parallelism().map_or(0, usize::from), system },
            seed,
            parameters: Parameters {
                long_tokens: args.long_tokens,
                longs: args.longs,
                offset_s: args.offset,
                reps: args.reps,
                idle_shorts: args.idle_shorts,
                stream_peer: args.stream_peer,
                peer_max_tokens: args.peer_max_tokens,
                short_max_tokens: args.short_max_tokens,
                long_max_tokens: args.long_max_tokens,
                extra_body: args.extra_body.clone(),
            },
            notes: args.note.iter().map(|note| split_note(note)).collect::<anyhow::Result<_>>()?,
        })
    }
}

fn split_note(note: &str) -> anyhow::Result<(String, String)> {
    let (name, value) = note.split_once('=').with_context(|| format!("--note {note}: must be NAME=VALUE"))?;
    Ok((name.to_owned(), value.to_owned()))
}

/// As it was typed, with the key taken out and arguments quoted where a shell needs it.
fn command_line(words: impl Iterator<Item = String>, secret: Option<&str>) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    let words = words.map(|word| match secret.filter(|secret| !secret.is_empty()) {
        Some(secret) => word.replace(secret, "***"),
        None => word,
    });
    let quoted = words.map(|word| {
        if !word.is_empty() && word.chars().all(plain) {
            return word;
        }
        format!("'{}'", word.replace('\'', r"'\''"))
    });
    quoted.collect::<Vec<_>>().join(" ")
}

/// `summary.json`.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    #[serde(flatten)]
    pub(crate) about: About,
    pub(crate) interrupted: bool,
    pub(crate) arms: BTreeMap<&'static str, ArmSummary>,
}

/// Medians and ranges of one arm over its valid repetitions.
#[derive(Debug, Default, Serialize)]
pub(crate) struct ArmSummary {
    pub(crate) repetitions: usize,
    pub(crate) valid: usize,
    /// Why the others are not.
    pub(crate) invalid: Vec<String>,
    pub(crate) short_ttft_idle_s: Option<Spread>,
    pub(crate) short_ttft_behind_s: Option<Spread>,
    pub(crate) slowdown: Option<Spread>,
    pub(crate) h: Option<Spread>,
    pub(crate) offset_s: Option<Spread>,
    pub(crate) long_prompt_tokens: Option<Spread>,
    pub(crate) long_ttft_alone_s: Option<Spread>,
    pub(crate) long_ttft_first_s: Option<Spread>,
    pub(crate) long_ttft_last_s: Option<Spread>,
    pub(crate) peer_worst_gap_s: Option<Spread>,
    pub(crate) peer_worst_gap_control_s: Option<Spread>,
    /// Worst gap beside the long prompts ÷ worst gap without them, by repetition.
    pub(crate) peer_worst_gap_ratio: Option<Spread>,
    pub(crate) peer_median_gap_s: Option<Spread>,
    pub(crate) peers_ended_early: usize,
    /// Long prompts by the first word of `x-segue-route`.
    pub(crate) long_routes: BTreeMap<String, usize>,
}

/// What one arm has given so far.
#[derive(Debug, Default)]
struct ArmRecord {
    estimates: Vec<Estimate>,
    invalid: Vec<String>,
    long_alone_s: Vec<f64>,
    long_prompt_tokens: Vec<f64>,
    long_routes: BTreeMap<String, usize>,
}

/// Which request a row of `raw.jsonl` belongs to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) arm: Arm,
    /// From 0; `None` before the repetitions.
    pub(crate) repetition: Option<usize>,
    /// From 0, among the requests of the same kind.
    pub(crate) index: usize,
}

/// Collects the run.
#[derive(Debug)]
pub(crate) struct Recorder {
    about: About,
    directory: Option<PathBuf>,
    raw: Option<File>,
    write_error: Option<std::io::Error>,
    arms: BTreeMap<Arm, ArmRecord>,
}

impl Recorder {
    /// Opens the files first, so that nobody measures for an hour into a directory that cannot be written.
    pub(crate) fn create(directory: Option<&Path>, about: About, arms: &[Arm]) -> anyhow::Result<Self> {
        let raw = directory.map(open_raw).transpose()?;
        let arms = arms.iter().map(|&arm| (arm, ArmRecord::default())).collect();
        Ok(Self { about, directory: directory.map(Path::to_owned), raw, write_error: None, arms })
    }

    pub(crate) fn about(&self) -> &About {
        &self.about
    }

    /// Adds a row to `raw.jsonl`.
    pub(crate) fn request(&mut self, kind: &'static str, place: Place, timeline: &Timeline) {
        let Some(raw) = &mut self.raw else { return };
        let line = format!("{}\n", row(kind, place, timeline));
        if let Err(error) = raw.write_all(line.as_bytes()) {
            // The measurement is worth more than the file: go on, and say so at the end.
            self.write_error.get_or_insert(error);
        }
    }

    pub(crate) fn long_alone(&mut self, arm: Arm, ttft: Result<f64, Invalid>) {
        self.arms.entry(arm).or_default().long_alone_s.extend(ttft.ok());
    }

    pub(crate) fn repetition(&mut self, arm: Arm, measured: &Repetition, result: Result<Estimate, Invalid>) {
        let record = self.arms.entry(arm).or_default();
        for long in &measured.longs {
            record.long_prompt_tokens.extend(long.usage.map(|usage| usage.prompt_tokens as f64));
            if let Some(route) = long.route_name() {
                *record.long_routes.entry(route.to_owned()).or_default() += 1;
            }
        }
        match result {
            Ok(estimate) => record.estimates.push(estimate),
            Err(invalid) => record.invalid.push(invalid.to_string()),
        }
    }

    /// Prints the medians and writes the files. An arm without any valid repetition is an error, unless
    /// the run was interrupted.
    pub(crate) fn finish(mut self, interrupted: bool) -> anyhow::Result<()> {
        let arms = self.arms.iter().map(|(arm, record)| (arm.name(), record.summary())).collect();
        let summary = Summary { about: self.about, interrupted, arms };
        println!("{}", report::medians(&summary));
        if interrupted {
            println!("interrupted: only what was finished before counts");
        }
        if let Some(directory) = &self.directory {
            let json = serde_json::to_string_pretty(&summary)? + "\n";
            write(&directory.join("summary.json"), &json)?;
            write(&directory.join("README.md"), &report::readme(&summary))?;
            if let Some(error) = self.write_error.take() {
                bail!("{}: rows are missing: {error}", directory.join("raw.jsonl").display());
            }
            println!("written: {}/raw.jsonl, summary.json, README.md", directory.display());
        }
        for (arm, numbers) in &summary.arms {
            ensure!(interrupted || numbers.valid > 0, "arm {arm}: no repetition is valid");
        }
        Ok(())
    }
}

impl ArmRecord {
    fn summary(&self) -> ArmSummary {
        let all = |pick: &dyn Fn(&Estimate) -> Option<f64>| {
            Spread::of(&self.estimates.iter().filter_map(pick).collect::<Vec<_>>())
        };
        let peers = || self.estimates.iter().filter_map(|estimate| estimate.peer.as_ref());
        ArmSummary {
            repetitions: self.estimates.len() + self.invalid.len(),
            valid: self.estimates.len(),
            invalid: self.invalid.clone(),
            short_ttft_idle_s: all(&|e| Some(e.idle_ttft_s)),
            short_ttft_behind_s: all(&|e| Some(e.short_ttft_s)),
            slowdown: all(&|e| Some(e.slowdown)),
            h: all(&|e| Some(e.h)),
            offset_s: all(&|e| Some(e.offset_s)),
            long_prompt_tokens: Spread::of(&self.long_prompt_tokens),
            long_ttft_alone_s: Spread::of(&self.long_alone_s),
            long_ttft_first_s: all(&|e| e.long_ttfts_s.first().copied()),
            long_ttft_last_s: all(&|e| e.long_ttfts_s.last().copied()),
            peer_worst_gap_s: all(&|e| Some(e.peer.as_ref()?.worst_gap_s)),
            peer_worst_gap_control_s: all(&|e| e.peer.as_ref()?.control_worst_gap_s),
            peer_worst_gap_ratio: all(&|e| {
                let peer = e.peer.as_ref()?;
                Some(peer.worst_gap_s / peer.control_worst_gap_s?)
            }),
            peer_median_gap_s: all(&|e| Some(e.peer.as_ref()?.median_gap_s)),
            peers_ended_early: peers().filter(|peer| peer.ended_early).count(),
            long_routes: self.long_routes.clone(),
        }
    }
}

fn row(kind: &'static str, place: Place, timeline: &Timeline) -> Value {
    let since_sent = |at: std::time::Duration| round(at.saturating_sub(timeline.sent).as_secs_f64());
    let usage = timeline.usage;
    let mut row = json!({
        "kind": kind,
        "arm": place.arm.name(),
        "repetition": place.repetition,
        "index": place.index,
        "sent_s": round(timeline.sent.as_secs_f64()),
        "headers_s": timeline.headers.map(since_sent),
        "first_byte_s": timeline.first_byte.map(since_sent),
        "role_s": timeline.role.map(since_sent),
        "ttft_s": timeline.ttft().map(|ttft| round(ttft.as_secs_f64())),
        "ended_s": since_sent(timeline.ended),
        "content_chunks": timeline.contents.len(),
        "prompt_tokens": usage.map(|usage| usage.prompt_tokens),
        "completion_tokens": usage.map(|usage| usage.completion_tokens),
        "cached_tokens": usage.and_then(|usage| usage.cached_tokens),
        "finish_reason": timeline.finish_reason,
        "route": timeline.route,
        "outcome": timeline.outcome.to_string(),
    });
    if kind.starts_with("peer") {
        // All arrivals, so that others can compute the gaps themselves.
        row["content_s"] = timeline.contents.iter().copied().map(since_sent).collect();
    }
    row
}

/// Microseconds are finer than anything here is measured.
fn round(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e6
}

fn open_raw(directory: &Path) -> anyhow::Result<File> {
    let path = directory.join("raw.jsonl");
    fs::create_dir_all(directory).with_context(|| format!("--out {}", directory.display()))?;
    ensure!(
        !path.exists(),
        "--out {}: already holds a measurement; choose another directory",
        directory.display()
    );
    File::create(&path).with_context(|| path.display().to_string())
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    fs::write(path, text).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_never_reaches_the_command_line_of_the_evidence() {
        let words = ["segue", "--api-key=s3cret", "--api-key", "s3cret", "--extra-body", r#"{"a":1}"#];
        let line = command_line(words.map(str::to_owned).into_iter(), Some("s3cret"));
        assert_eq!(line, r#"segue '--api-key=***' --api-key '***' --extra-body '{"a":1}'"#);
    }

    #[test]
    fn a_note_without_a_name_is_refused() {
        assert_eq!(split_note("a=b=c").unwrap(), ("a".to_owned(), "b=c".to_owned()));
        assert!(split_note("abc").unwrap_err().to_string().contains("--note abc: must be NAME=VALUE"));
    }
}
