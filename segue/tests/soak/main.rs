//! Long tests, for `make soak`: run by name with `--ignored`. Those that do not
//! count to a number last as long as `SEGUE_SOAK_SECONDS` says (default 60).

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "tests fail loudly and measure real time")]

mod chaos;
mod failed_loads;
mod flat;
#[allow(dead_code, unused_imports, reason = "each test binary uses its part")]
#[path = "../mesh/harness/mod.rs"]
mod harness;
mod idle;
mod mixing;
mod prompts;

use std::time::Duration;

/// How long a soak test runs.
fn soak_time() -> Duration {
    let seconds = std::env::var("SEGUE_SOAK_SECONDS").ok().map(|text| text.parse().expect("whole seconds"));
    Duration::from_secs(seconds.unwrap_or(60))
}
