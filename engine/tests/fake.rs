//! The twin behaves like the real engine, and shows every mix-up.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{SLOT, argmax, config, greedy, hand_over, prefill};
use engine::fake::{BOS, CORRUPT, EOS, Failure, FakeModel, FakeOptions, TURN_END};
use engine::{BatchItem, EngineError, InstallBlob, Model, Session};
use kv_block::{SlotId, Token};

fn fake() -> FakeModel {
    FakeModel::new(FakeOptions { end_one_in: 0, ..FakeOptions::default() }).unwrap()
}

fn tokens(text: &str) -> Vec<Token> {
    fake().vocabulary().tokenize(text, true, true)
}

/// What the receiver says after `install` put rows into its slot.
fn answer(receiver: &mut dyn Session, last: Token) -> Vec<Token> {
    greedy(receiver, SLOT, last, 8).0
}

/// Rows of `prompt`, all but its last token, on their way to `receiver`.
fn blob_of(model: &FakeModel, receiver: &mut dyn Session, prompt: &[Token]) -> InstallBlob {
    let mut sender = model.prefill_session(&config(1, 512)).unwrap();
    prefill(&mut *sender, SLOT, &prompt[..prompt.len() - 1], 16, false);
    hand_over(&mut *sender, receiver, SLOT, prompt.len() - 1, 16)
}

#[test]
fn handed_over_answer_equals_the_colocated_one_and_the_prediction() {
    let model = fake();
    let prompt = tokens("It begins with a question of some length.");
    let (last, body) = prompt.split_last().unwrap();
    let mut alone = model.decode_session(&config(1, 512)).unwrap();
    prefill(&mut *alone, SLOT, body, 7, false);
    let (expected, expected_logits) = greedy(&mut *alone, SLOT, *last, 20);
    assert_eq!(model.continuation(&prompt, 20), expected);

    let mut receiver = model.decode_session(&config(3, 512)).unwrap();
    blob_of(&model, &mut *receiver, &prompt);
    assert_eq!(greedy(&mut *receiver, SLOT, *last, 20), (expected, expected_logits));
}

#[test]
fn rows_of_another_prompt_show() {
    let model = fake();
    let mut receiver = model.decode_session(&config(1, 512)).unwrap();
    let (mine, other) = (tokens("my own prompt, mine"), tokens("your own prompt, yours"));
    let donor = blob_of(&model, &mut *receiver, &other);
    let mut blob = blob_of(&model, &mut *receiver, &mine);
    // One row of one part is enough.
    let (part, _) = receiver.layout().parts()[3];
    let row = donor.rows(part, 9..10).unwrap().to_vec();
    blob.rows_mut(part, 9..10).unwrap().copy_from_slice(&row);
    receiver.install(SLOT, &blob).unwrap();
    assert_eq!(answer(&mut *receiver, *mine.last().unwrap()), [CORRUPT; 8]);
    assert_eq!(model.vocabulary().piece(CORRUPT, false), b"<corrupt>");
}

#[test]
fn rows_at_another_position_or_in_another_part_or_missing_show() {
    let model = fake();
    let prompt = tokens("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa");
    let last = *prompt.last().unwrap();
    let mut receiver = model.decode_session(&config(1, 512)).unwrap();
    let good = blob_of(&model, &mut *receiver, &prompt);
    let parts: Vec<_> = receiver.layout().parts().iter().map(|(part, _)| *part).collect();
    let mut damaged = |from: (usize, usize), to: (usize, usize)| {
        let template = receiver.blob_template().unwrap();
        let mut blob = good.prefix(&template, good.token_count());
        let row = good.rows(parts[from.0], from.1..from.1 + 1).unwrap().to_vec();
        blob.rows_mut(parts[to.0], to.1..to.1 + 1).unwrap().copy_from_slice(&row);
        receiver.install(SLOT, &blob).unwrap();
        answer(&mut *receiver, last)[0]
    };
    assert_ne!(damaged((2, 5), (2, 5)), CORRUPT);
    assert_eq!(damaged((2, 5), (2, 6)), CORRUPT);
    assert_eq!(damaged((2, 5), (3, 5)), CORRUPT);
    assert_eq!(damaged((0, 5), (0, 6)), CORRUPT);

    let empty = receiver.blob_template().unwrap().blob(10);
    receiver.install(SLOT, &empty).unwrap();
    assert_eq!(answer(&mut *receiver, last)[0], CORRUPT);
}

#[test]
fn rows_of_another_model_show() {
    let prompt = tokens("the same words");
    let other = FakeModel::new(FakeOptions { seed: 7, ..FakeOptions::default() }).unwrap();
    let mut receiver = fake().decode_session(&config(1, 512)).unwrap();
    assert_ne!(other.fingerprint(), fake().fingerprint());
    blob_of(&other, &mut *receiver, &prompt);
    assert_eq!(answer(&mut *receiver, *prompt.last().unwrap()), [CORRUPT; 8]);
}

#[test]
fn truncating_recovers_the_answer_before() {
    let model = fake();
    let prompt = tokens("one two three");
    let mut session = model.decode_session(&config(2, 64)).unwrap();
    let slot = SlotId(1);
    prefill(&mut *session, slot, &prompt, 4, false);
    prefill(&mut *session, slot, &tokens("noise"), 4, false);
    session.truncate(slot, prompt.len() - 1).unwrap();
    let (got, _) = greedy(&mut *session, slot, *prompt.last().unwrap(), 8);
    assert_eq!(got, model.continuation(&prompt, 8));
    session.clear(slot);
    assert_eq!(session.resident(slot), 0);
}

#[test]
fn answers_end_where_the_prediction_ends() {
    let model = FakeModel::new(FakeOptions { end_one_in: 8, ..FakeOptions::default() }).unwrap();
    let prompt = tokens("short");
    let expected = model.continuation(&prompt, 1000);
    assert!(expected.len() < 1000);
    let mut session = model.decode_session(&config(1, 2048)).unwrap();
    prefill(&mut *session, SLOT, &prompt[..prompt.len() - 1], 64, false);
    let (got, _) = greedy(&mut *session, SLOT, *prompt.last().unwrap(), expected.len() + 1);
    assert_eq!(got[..expected.len()], expected);
    assert_eq!(got[expected.len()], EOS);
}

#[test]
fn failures_come_when_ordered_and_leave_the_slot_alone() {
    let model = fake();
    let mut session = model.prefill_session(&config(1, 64)).unwrap();
    let item = BatchItem { slot: SLOT, tokens: &[BOS, Token(65)], logits: true };
    model.fail_next(Failure::Step, 1);
    assert!(matches!(session.step(&[item]), Err(EngineError::Decode(-3))));
    assert_eq!(session.resident(SLOT), 0);
    session.step(&[item]).unwrap();
    assert_eq!(argmax(session.logits(0)), model.continuation(item.tokens, 1)[0]);
    model.fail_next(Failure::Export, 1);
    assert!(session.export(SLOT, 0..1).is_err());
    assert!(session.export(SLOT, 0..1).is_ok());
    let blob = session.blob_template().unwrap().blob(1);
    model.fail_next(Failure::Install, 1);
    assert!(session.install(SLOT, &blob).is_err());
    assert_eq!(session.resident(SLOT), 2);
}

#[test]
fn bounds_are_those_of_the_real_engine() {
    let model = fake();
    let error = model.prefill_session(&config(2, 64)).err().unwrap();
    assert_eq!(error.to_string(), "slots is 2, allowed 1 to 1");
    let mut session = model.decode_session(&config(1, 64)).unwrap();
    prefill(&mut *session, SLOT, &tokens("four"), 64, false);
    assert!(matches!(session.export(SLOT, 1..2), Err(EngineError::Range { .. })));
    let long = vec![BOS; 64];
    let item = BatchItem { slot: SLOT, tokens: &long, logits: false };
    assert!(matches!(session.step(&[item]), Err(EngineError::ContextFull { wanted: 69, limit: 64, .. })));
    let narrow = FakeModel::new(FakeOptions { row_bytes: 8, ..FakeOptions::default() }).err().unwrap();
    assert_eq!(narrow.to_string(), "row_bytes is 8, allowed 16 or more");
}

#[test]
fn model_class_without_blocks_serves_locally_and_gives_no_template() {
    let options = FakeOptions { blocks_supported: false, ..FakeOptions::default() };
    let model = FakeModel::new(options).unwrap();
    assert!(model.blocks_supported().is_err());
    assert!(matches!(model.prefill_session(&config(1, 64)), Err(EngineError::BlocksUnsupported(_))));
    let mut session = model.decode_session(&config(1, 64)).unwrap();
    assert!(matches!(session.blob_template(), Err(EngineError::BlocksUnsupported(_))));
    prefill(&mut *session, SLOT, &tokens("local"), 64, true);
    assert_ne!(argmax(session.logits(0)), CORRUPT);
}

#[test]
fn text_and_control_tokens_survive_a_round_trip() {
    let vocabulary = fake().vocabulary();
    let text = "<s>Grüße, 世界<|im_end|>";
    let tokens = vocabulary.tokenize(text, true, true);
    assert_eq!((tokens[0], *tokens.last().unwrap()), (BOS, TURN_END));
    let bytes: Vec<u8> = tokens.iter().flat_map(|&token| vocabulary.piece(token, true)).collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), text);
    assert_eq!(vocabulary.tokenize("<s>", false, false).len(), 3);
    assert!(vocabulary.is_end(TURN_END) && vocabulary.is_end(EOS) && !vocabulary.is_end(BOS));
}
