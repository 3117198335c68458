//! The whole mesh, as a user sees it: real processes, the real demo model, HTTP.
//!
//! Needs the demo model in the cache (`make models`). Tests run one after the
//! other: they measure time, and two meshes on the same processors disturb
//! each other.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "tests fail loudly and measure real time")]

mod answers;
mod bad_input;
mod crowds;
mod failures;
#[allow(dead_code, unused_imports, reason = "each test binary uses its part")]
mod harness;
mod official_client;
mod processes;
mod takeover;
