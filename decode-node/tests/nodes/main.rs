//! Whole nodes over real QUIC, with the fake engine where a test needs control
//! of time or faults.
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(clippy::disallowed_methods, reason = "tests start tasks and wait in real time")]

mod handoffs;
mod harness;
mod links;
mod relay;
