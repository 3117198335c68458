//! Prompts that are nearly the same.

use crate::harness::{self, ANIMALS, twins, wrong_answers};

/// Asked in bulk.
const PROMPTS: usize = 2000;

// C13
#[tokio::test]
#[ignore = "takes minutes: make soak"]
async fn two_thousand_prompts_that_differ_in_one_token_never_mix() {
    let (_turn, client) = harness::shared().await;
    // Both sides of each border between blocks of 64, and a step away.
    let twins = twins(&client, &[62, 63, 64, 65, 127, 128, 129], &ANIMALS).await;
    let wrong = wrong_answers(&client, &twins, PROMPTS).await;
    println!("{PROMPTS} answers to {} prompts", twins.len());
    assert!(wrong.is_empty(), "{wrong:?}");
}
