//! Faults that users of comparable systems have met, as black-box tests: real
//! processes, the real demo model. `docs/faults.md` lists which test stands for
//! which; the ids in the comments are its rows.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "tests fail loudly and measure real time")]

mod caches;
mod connections;
mod departures;
#[allow(dead_code, unused_imports, reason = "each test binary uses its part")]
#[path = "../mesh/harness/mod.rs"]
mod harness;
mod no_prefill;
mod repeats;
mod secrets;
