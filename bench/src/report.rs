//! The measurement as text: lines for the terminal and the README of the evidence.

use crate::estimate::{Estimate, Invalid, Repetition};
use crate::record::{About, ArmSummary, Summary};
use crate::schedule::Arm;
use crate::stats::Spread;
use crate::timeline::Timeline;

/// What is about to be measured.
pub(crate) fn heading(about: &About) -> String {
    let p = &about.parameters;
    format!(
        "inverse arrival on {} (model {}): {} long prompt(s) of about {} tokens, then a short one after {} s; \
         {} repetition(s) per arm",
        about.url, about.model, p.longs, p.long_tokens, p.offset_s, p.reps
    )
}

/// One long prompt with nothing beside it.
pub(crate) fn long_alone(arm: Arm, timeline: &Timeline, ttft: &Result<f64, Invalid>) -> String {
    let tokens = timeline.usage.map_or("unknown".to_owned(), |usage| usage.prompt_tokens.to_string());
    match ttft {
        Ok(ttft) => format!("{}: long prompt alone, {tokens} tokens: TTFT {ttft:.3} s", arm.name()),
        Err(invalid) => format!("{}: long prompt alone: {invalid}", arm.name()),
    }
}

/// Column names, in the order of `table_row`.
pub(crate) fn table_head() -> String {
    format!(
        "\n{:>3}  {:<6}  {:>12}  {:>12}  {:>9}  {:>7}  {:>12}  {:>12}  {:>12}",
        "rep", "arm", "idle TTFT", "behind long", "slowdown", "h", "long TTFT", "worst gap", "without long"
    )
}

/// One repetition, or why it is invalid.
pub(crate) fn table_row(
    repetition: usize,
    arm: Arm,
    measured: &Repetition,
    result: &Result<Estimate, Invalid>,
) -> String {
    let start = format!("{:>3}  {:<6}", repetition + 1, arm.name());
    let estimate = match result {
        Ok(estimate) => estimate,
        Err(invalid) => return format!("{start}  invalid: {invalid}"),
    };
    let peer = estimate.peer.as_ref();
    let row = format!(
        "{start}  {:>12}  {:>12}  {:>9}  {:>7.4}  {:>12}  {:>12}  {:>12}",
        millis(Some(estimate.idle_ttft_s)),
        millis(Some(estimate.short_ttft_s)),
        format!("{:.2} x", estimate.slowdown),
        estimate.h,
        format!("{:.3} s", estimate.long_ttfts_s.last().copied().unwrap_or(f64::NAN)),
        millis(peer.map(|peer| peer.worst_gap_s)),
        millis(peer.and_then(|peer| peer.control_worst_gap_s)),
    );
    let remarks = remarks(measured, estimate);
    if remarks.is_empty() { row } else { format!("{row}  ({})", remarks.join("; ")) }
}

fn remarks(measured: &Repetition, estimate: &Estimate) -> Vec<String> {
    let mut remarks = Vec::new();
    if let Some(cached) = measured.short.usage.and_then(|usage| usage.cached_tokens).filter(|&n| n > 0) {
        remarks.push(format!("{cached} tokens of the short prompt were cached"));
    }
    match (&measured.peer, &estimate.peer) {
        (Some(peer), None) => remarks.push(format!("no peer stream to judge: {}", peer.outcome)),
        (Some(_), Some(judged)) if judged.ended_early => {
            remarks
                .push("peer stream ended before the long's first token; raise --peer-max-tokens".to_owned());
        }
        _ => {}
    }
    remarks
}

/// The medians, one line per number and one column per arm.
pub(crate) fn medians(summary: &Summary) -> String {
    let mut text = String::from("\nmedian [min … max]\n");
    for (name, unit, pick) in NUMBERS {
        if summary.arms.values().all(|arm| pick(arm).is_none()) {
            continue;
        }
        let cells: Vec<String> = summary
            .arms
            .iter()
            .map(|(arm, numbers)| format!("{arm:>6} {:<34}", spread(pick(numbers), *unit)))
            .collect();
        text.push_str(&format!("  {name:<32} {}\n", cells.join(" ").trim_end()));
    }
    for (arm, numbers) in &summary.arms {
        if numbers.valid < numbers.repetitions {
            let invalid = numbers.repetitions - numbers.valid;
            text.push_str(&format!(
                "  {arm}: {invalid} of {} repetitions are invalid\n",
                numbers.repetitions
            ));
        }
        if !numbers.long_routes.is_empty() {
            let routes: Vec<String> =
                numbers.long_routes.iter().map(|(route, count)| format!("{count} {route}")).collect();
            text.push_str(&format!("  {arm}: long prompts were prefilled {}\n", routes.join(", ")));
        }
    }
    text
}

/// The README of an evidence directory.
pub(crate) fn readme(summary: &Summary) -> String {
    let about = &summary.about;
    let mut text = format!(
        "# Inverse arrival, {}\n\nHow long does a short request wait that arrives behind {} long prompt(s)?\n\n\
         ```text\n{}\n```\n\n",
        about.date, about.parameters.longs, about.command_line
    );
    text.push_str(&format!(
        "- Server: {}, model {}\n- Measured with: {}\n- Machine of the client: {} CPUs, {}\n- Seed: {}\n",
        about.url, about.model, about.tool, about.host.cpus, about.host.system, about.seed
    ));
    for (name, value) in &about.notes {
        text.push_str(&format!("- {name}: {value}\n"));
    }
    if summary.interrupted {
        text.push_str("\n**Interrupted**: fewer repetitions than asked for.\n");
    }
    text.push_str(&format!("\n```text\n{}```\n\n{DEFINITIONS}", medians(summary).trim_start()));
    text
}

const DEFINITIONS: &str = "\
- *TTFT*: from just before the connection is opened to the first chunk with text in it.
- *slowdown*: TTFT of the short request behind the long prompts ÷ median TTFT of the idle short requests of
  the same repetition.
- *h* (blocking fraction): (TTFT behind − TTFT idle) ÷ (TTFT of the last long prompt − offset). 0: not held
  up; 1: held up until the last long prompt had its first token.
- *worst gap*: largest pause in a stream that was already running, between the send of the long prompts and
  the last one's first token. *without long*: the same again without the long prompts, that is such a stream
  over an equal stretch with a short request at the same offset. A pause ends with the next token, even if
  that token has no text of its own.
- Every prompt starts with random words. A repetition with more than 1 % of a long prompt from a cache, a
  refused or broken request, or a long prompt that finished before the offset is invalid and has no numbers.

`raw.jsonl` has one row per request, times in seconds: `sent_s` since the start of the run, all others since
that request was sent. `summary.json` has the parameters and the medians.
";

#[derive(Clone, Copy)]
enum Unit {
    Seconds,
    Millis,
    Times,
    Ratio,
    Tokens,
}

type Pick = fn(&ArmSummary) -> Option<Spread>;

const NUMBERS: &[(&str, Unit, Pick)] = &[
    ("short TTFT, idle", Unit::Millis, |arm| arm.short_ttft_idle_s),
    ("short TTFT, behind long", Unit::Millis, |arm| arm.short_ttft_behind_s),
    ("slowdown", Unit::Times, |arm| arm.slowdown),
    ("h, blocking fraction", Unit::Ratio, |arm| arm.h),
    ("long prompt", Unit::Tokens, |arm| arm.long_prompt_tokens),
    ("long TTFT, alone", Unit::Seconds, |arm| arm.long_ttft_alone_s),
    ("long TTFT, first of them", Unit::Seconds, |arm| arm.long_ttft_first_s),
    ("long TTFT, last of them", Unit::Seconds, |arm| arm.long_ttft_last_s),
    ("running stream, worst gap", Unit::Millis, |arm| arm.peer_worst_gap_s),
    ("  without long", Unit::Millis, |arm| arm.peer_worst_gap_control_s),
    ("  with ÷ without", Unit::Times, |arm| arm.peer_worst_gap_ratio),
];

fn spread(spread: Option<Spread>, unit: Unit) -> String {
    let Some(Spread { median, min, max, .. }) = spread else { return "–".to_owned() };
    match unit {
        Unit::Seconds => format!("{median:.3} s [{min:.3} … {max:.3}]"),
        Unit::Millis => {
            format!("{:.1} ms [{:.1} … {:.1}]", median * 1e3, min * 1e3, max * 1e3)
        }
        Unit::Times => format!("{median:.2} x [{min:.2} … {max:.2}]"),
        Unit::Ratio => format!("{median:.4} [{min:.4} … {max:.4}]"),
        Unit::Tokens => format!("{median:.0} tokens [{min:.0} … {max:.0}]"),
    }
}

fn millis(seconds: Option<f64>) -> String {
    seconds.map_or("–".to_owned(), |seconds| format!("{:.1} ms", seconds * 1e3))
}
