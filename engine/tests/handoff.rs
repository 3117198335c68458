//! Rows that move between sessions of the real engine, on both demo models.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{GEMMA, SLOT, SMOLLM, config, greedy, hand_over, model, prefill, prompt};
use engine::{BatchItem, EngineError, Session};
use kv_block::SlotId;

/// No multiple of a chunk, and longer than Gemma's window of 512 tokens.
fn prompt_tokens(file: &str) -> usize {
    if file == GEMMA { 600 } else { 300 }
}

const CHUNK: usize = 256;

fn handed_over_continuation_equals_the_colocated_run(file: &'static str) {
    let model = model(file);
    let tokens = prompt(&*model, prompt_tokens(file));
    let (last, body) = tokens.split_last().unwrap();

    let mut alone = model.decode_session(&config(2, 1024)).unwrap();
    prefill(&mut *alone, SLOT, body, CHUNK, false);
    let (expected, expected_logits) = greedy(&mut *alone, SLOT, *last, 12);
    drop(alone);

    let mut sender = model.prefill_session(&config(1, 1024)).unwrap();
    let mut receiver = model.decode_session(&config(2, 1024)).unwrap();
    assert_eq!(sender.layout(), receiver.layout());
    prefill(&mut *sender, SLOT, body, CHUNK, false);
    hand_over(&mut *sender, &mut *receiver, SLOT, body.len(), CHUNK);
    assert_eq!(receiver.resident(SLOT), body.len());
    let (got, logits) = greedy(&mut *receiver, SLOT, *last, 12);

    assert_eq!(got, expected);
    assert!(logits == expected_logits, "logits differ in bits at equal cells and batch shapes");
}

#[test]
fn handed_over_continuation_equals_the_colocated_run_with_plain_attention() {
    handed_over_continuation_equals_the_colocated_run(SMOLLM);
}

#[test]
fn handed_over_continuation_equals_the_colocated_run_with_a_sliding_window() {
    handed_over_continuation_equals_the_colocated_run(GEMMA);
}

fn installed_rows_equal_exported_rows(file: &'static str) {
    let model = model(file);
    let tokens = prompt(&*model, prompt_tokens(file));
    let mut sender = model.prefill_session(&config(1, 1024)).unwrap();
    let mut receiver = model.decode_session(&config(3, 1024)).unwrap();
    let slot = SlotId(1);
    // Neighbours of other lengths must not show in the export.
    prefill(&mut *receiver, SlotId(2), &tokens[..40], CHUNK, false);
    prefill(&mut *sender, SLOT, &tokens, CHUNK, false);
    let blob = hand_over(&mut *sender, &mut *receiver, slot, tokens.len(), CHUNK);
    let whole = sender.export(SLOT, 0..tokens.len()).unwrap();
    let installed = receiver.export(slot, 0..tokens.len()).unwrap();
    for &(part, _) in sender.layout().parts() {
        let all = 0..tokens.len();
        assert!(whole.rows(part, all.clone()) == installed.rows(part, all.clone()), "{part}");
        assert!(whole.rows(part, 100..300) == blob.rows(part, 100..300).unwrap(), "{part}");
    }
}

#[test]
fn installed_rows_equal_exported_rows_with_plain_attention() {
    installed_rows_equal_exported_rows(SMOLLM);
}

#[test]
fn installed_rows_equal_exported_rows_with_a_sliding_window() {
    installed_rows_equal_exported_rows(GEMMA);
}

#[test]
fn a_range_exports_the_same_bytes_as_the_whole() {
    for file in [SMOLLM, GEMMA] {
        let model = model(file);
        let count = prompt_tokens(file);
        let tokens = prompt(&*model, count);
        let mut session = model.prefill_session(&config(1, 1024)).unwrap();
        // Ranges exported while the prompt grows, as in a handoff.
        let mut early = Vec::new();
        for range in [0..100, 100..256, 256..count] {
            prefill(&mut *session, SLOT, &tokens[range.clone()], CHUNK, false);
            early.push(session.export(SLOT, range).unwrap());
        }
        let whole = session.export(SLOT, 0..count).unwrap();
        for &(part, _) in session.layout().parts() {
            for piece in &early {
                let range = piece.tokens();
                assert!(piece.rows(part, range.clone()) == whole.rows(part, range), "{part}");
            }
        }
    }
}

#[test]
fn a_suffix_prefilled_on_an_installed_prefix_equals_the_colocated_run() {
    for file in [SMOLLM, GEMMA] {
        let model = model(file);
        let tokens = prompt(&*model, 400);
        let (last, body) = tokens.split_last().unwrap();
        let mut alone = model.decode_session(&config(2, 512)).unwrap();
        prefill(&mut *alone, SLOT, &body[..256], CHUNK, false);
        prefill(&mut *alone, SLOT, &body[256..], CHUNK, false);
        let (_, expected) = greedy(&mut *alone, SLOT, *last, 8);

        let mut sender = model.prefill_session(&config(1, 512)).unwrap();
        prefill(&mut *sender, SLOT, &body[..256], CHUNK, false);
        let mut receiver = model.decode_session(&config(2, 512)).unwrap();
        hand_over(&mut *sender, &mut *receiver, SLOT, 256, 64);
        prefill(&mut *receiver, SLOT, &body[256..], CHUNK, false);
        let (_, got) = greedy(&mut *receiver, SLOT, *last, 8);
        assert!(got == expected, "{file}: logits differ");
    }
}

#[test]
fn a_prefix_installs_into_a_prefill_session_too() {
    let model = model(SMOLLM);
    let tokens = prompt(&*model, 300);
    let mut first = model.prefill_session(&config(1, 512)).unwrap();
    prefill(&mut *first, SLOT, &tokens[..256], CHUNK, false);
    let mut second = model.prefill_session(&config(1, 512)).unwrap();
    hand_over(&mut *first, &mut *second, SLOT, 256, 64);
    prefill(&mut *first, SLOT, &tokens[256..], CHUNK, false);
    prefill(&mut *second, SLOT, &tokens[256..], CHUNK, false);
    let expected = first.export(SLOT, 0..300).unwrap();
    let got = second.export(SLOT, 0..300).unwrap();
    for &(part, _) in first.layout().parts() {
        assert!(got.rows(part, 0..300) == expected.rows(part, 0..300), "{part}");
    }
}

#[test]
fn truncating_forgets_the_tail_and_clearing_everything() {
    for file in [SMOLLM, GEMMA] {
        let model = model(file);
        let tokens = prompt(&*model, 200);
        let mut session = model.decode_session(&config(2, 512)).unwrap();
        prefill(&mut *session, SLOT, &tokens[..100], 100, false);
        let (_, expected) = greedy(&mut *session, SLOT, tokens[100], 3);

        session.truncate(SLOT, 100).unwrap();
        assert_eq!(session.resident(SLOT), 100);
        let (_, again) = greedy(&mut *session, SLOT, tokens[100], 3);
        assert!(again == expected, "{file}: the tail left something behind");

        session.clear(SLOT);
        assert_eq!(session.resident(SLOT), 0);
        prefill(&mut *session, SLOT, &tokens[..100], 100, false);
        let (_, afresh) = greedy(&mut *session, SLOT, tokens[100], 3);
        assert!(afresh == expected, "{file}: clearing left something behind");

        let error = session.truncate(SLOT, 500).unwrap_err();
        assert!(matches!(error, EngineError::Range { resident: 103, end: 500, .. }), "{error}");
    }
}

#[test]
fn neighbours_in_one_batch_do_not_mix() {
    let model = model(SMOLLM);
    let tokens = prompt(&*model, 160);
    let mut session = model.decode_session(&config(3, 256)).unwrap();
    prefill(&mut *session, SlotId(0), &tokens[..60], CHUNK, false);
    prefill(&mut *session, SlotId(1), &tokens[60..100], CHUNK, false);
    // Two running sequences and a prompt chunk together.
    let batch = [
        BatchItem { slot: SlotId(1), tokens: &tokens[100..101], logits: true },
        BatchItem { slot: SlotId(2), tokens: &tokens[20..90], logits: true },
        BatchItem { slot: SlotId(0), tokens: &tokens[60..61], logits: true },
    ];
    session.step(&batch).unwrap();
    let together: Vec<_> = (0..3).map(|item| common::argmax(session.logits(item))).collect();

    let mut alone = model.decode_session(&config(1, 256)).unwrap();
    let mut single = Vec::new();
    for tokens in [&tokens[60..101], &tokens[20..90], &tokens[..61]] {
        alone.clear(SLOT);
        prefill(&mut *alone, SLOT, tokens, CHUNK, true);
        single.push(common::argmax(alone.logits(0)));
    }
    assert_eq!(together, single);
}

#[test]
fn batches_and_ranges_out_of_bounds_are_named_and_change_nothing() {
    let model = model(SMOLLM);
    let tokens = prompt(&*model, 600);
    let mut session = model.decode_session(&config(2, 300)).unwrap();
    prefill(&mut *session, SLOT, &tokens[..200], CHUNK, false);
    let refused = |session: &mut dyn Session, slot: u16, tokens: &[kv_block::Token]| {
        session.step(&[BatchItem { slot: SlotId(slot), tokens, logits: false }]).unwrap_err().to_string()
    };
    assert_eq!(refused(&mut *session, 0, &[]), "batch: 0 tokens, allowed 1 to 256");
    assert_eq!(refused(&mut *session, 0, &tokens[..257]), "batch: 257 tokens, allowed 1 to 256");
    assert_eq!(refused(&mut *session, 2, &tokens[..1]), "batch: slot 2 of 2");
    assert_eq!(refused(&mut *session, 0, &tokens[..101]), "slot 0 would hold 301 tokens, limit 300");
    assert_eq!(refused(&mut *session, 0, &[kv_block::Token(49_152)]), "batch: token 49152 of 49152");
    let twice = [BatchItem { slot: SLOT, tokens: &tokens[..1], logits: false }; 2];
    assert_eq!(session.step(&twice).unwrap_err().to_string(), "batch: slot 0 is named twice");
    let range = session.export(SLOT, 10..20).unwrap_err().to_string();
    assert_eq!(range, "slot 0 holds 200 tokens, asked for 10..20");
    assert!(session.export(SlotId(9), 0..1).is_err());
    assert!(session.export(SlotId(1), 0..1).is_err());
    assert_eq!(session.resident(SLOT), 200);

    let blob = session.blob_template().unwrap().blob(301);
    let error = session.install(SLOT, &blob).unwrap_err();
    assert!(matches!(error, EngineError::ContextFull { wanted: 301, limit: 300, .. }), "{error}");
    assert_eq!(session.resident(SLOT), 200);
}

#[test]
fn a_blob_of_another_model_is_refused() {
    let mut session = model(SMOLLM).decode_session(&config(1, 256)).unwrap();
    let other = model(GEMMA).decode_session(&config(1, 256)).unwrap();
    let blob = other.blob_template().unwrap().blob(16);
    let error = session.install(SLOT, &blob).unwrap_err();
    assert!(matches!(error, EngineError::State(_)), "{error}");
}
