//! The greeting: exactly one is right, and every other is refused in words.
#![no_main]

use fuzz::{SMALL_BYTES, holding_at_most};
use kv_transfer::fuzzing::{check_greeting, greeting};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let answer = holding_at_most(SMALL_BYTES, || check_greeting(bytes));
    assert_eq!(answer.is_ok(), bytes == greeting());
    assert!(answer.err().is_none_or(|reason| reason.starts_with("the peer ")));
});
