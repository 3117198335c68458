//! Model files: what is refused, what identifies one, what its vocabulary does.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use common::{GEMMA, SMOLLM, config, model, model_path};
use engine::llama::{self, WeightType};
use engine::{EngineError, SessionConfig};

/// A directory of its own that goes away with the test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("segue-engine-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn refusal(path: &Path) -> String {
    let errors = [
        llama::load(path).err().expect("load refuses"),
        llama::load_vocabulary(path).err().expect("load_vocabulary refuses"),
        engine::fingerprint(path).expect_err("fingerprint refuses"),
        llama::model_summary(path).expect_err("model_summary refuses"),
    ];
    for error in &errors {
        assert!(matches!(error, EngineError::Load { .. }), "{error}");
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
        assert_eq!(error.to_string(), errors[0].to_string());
    }
    errors[0].to_string()
}

#[test]
fn files_that_are_no_models_are_refused_with_the_reason() {
    let scratch = Scratch::new("refused");
    assert!(refusal(&scratch.file("missing.gguf")).contains("No such file"));
    assert!(refusal(&scratch.0).ends_with("not a file"));

    let text = scratch.file("text.gguf");
    std::fs::write(&text, "no model at all").unwrap();
    assert!(refusal(&text).ends_with("not a GGUF file"));
    std::fs::write(&text, "").unwrap();
    assert!(refusal(&text).ends_with("not a GGUF file"));

    let whole = std::fs::read(model_path(SMOLLM)).unwrap();
    let cut = scratch.file("cut.gguf");
    std::fs::write(&cut, &whole[..whole.len() / 2]).unwrap();
    assert!(refusal(&cut).contains("truncated: tensor "), "{}", refusal(&cut));
    // Inside the metadata, and right behind the magic.
    for bytes in [100_000, 30, 4] {
        std::fs::write(&cut, &whole[..bytes]).unwrap();
        refusal(&cut);
    }
}

#[test]
fn fingerprint_depends_on_the_content_and_on_nothing_else() {
    let scratch = Scratch::new("fingerprint");
    let original = engine::fingerprint(&model_path(SMOLLM)).unwrap();
    assert_eq!(model(SMOLLM).fingerprint(), original);
    assert_ne!(engine::fingerprint(&model_path(GEMMA)).unwrap(), original);

    let copy = scratch.file("other-name.gguf");
    std::fs::copy(model_path(SMOLLM), &copy).unwrap();
    assert_eq!(engine::fingerprint(&copy).unwrap(), original);

    // A byte of the metadata, and the last byte of the last tensor.
    let bytes = std::fs::metadata(&copy).unwrap().len();
    for offset in [40, bytes - 40] {
        flip(&copy, offset);
        let changed = engine::fingerprint(&copy);
        assert!(changed.is_err() || changed.unwrap() != original, "byte {offset} does not count");
        flip(&copy, offset);
    }
    assert_eq!(engine::fingerprint(&copy).unwrap(), original);
}

fn flip(path: &Path, offset: u64) {
    use std::io::Read;
    let mut file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    file.seek(SeekFrom::Start(offset)).unwrap();
    let mut byte = [0];
    file.read_exact(&mut byte).unwrap();
    file.seek(SeekFrom::Start(offset)).unwrap();
    file.write_all(&[byte[0] ^ 1]).unwrap();
}

#[test]
fn summary_names_what_the_file_says() {
    let summary = llama::model_summary(&model_path(SMOLLM)).unwrap();
    assert_eq!(summary.architecture, "llama");
    assert_eq!(summary.context_tokens_max, 8192);
    assert!(summary.has_chat_template);
    assert_eq!(summary.name, model(SMOLLM).name());
    assert_eq!(model(SMOLLM).context_tokens_max(), 8192);
    let gemma = llama::model_summary(&model_path(GEMMA)).unwrap();
    assert_eq!(gemma.architecture, "gemma3");
    assert_eq!(gemma.context_tokens_max, 32768);
}

#[test]
fn requantized_model_runs_and_has_a_fingerprint_of_its_own() {
    let scratch = Scratch::new("requantize");
    let target = scratch.file("q8_0.gguf");
    llama::requantize(&model_path(SMOLLM), &target, WeightType::Q8_0, 2).unwrap();
    assert_eq!(std::fs::read_dir(&scratch.0).unwrap().count(), 1, "a partial file was left");
    let other = llama::load(&target).unwrap();
    assert_ne!(other.fingerprint(), model(SMOLLM).fingerprint());
    let mut session = other.decode_session(&config(1, 64)).unwrap();
    let tokens = other.vocabulary().tokenize("The capital of France is", true, false);
    common::prefill(&mut *session, common::SLOT, &tokens, 64, true);
    let best = common::argmax(session.logits(0));
    assert_eq!(other.vocabulary().piece(best, false), b" Paris");

    let missing = scratch.file("missing.gguf");
    assert!(llama::requantize(&missing, &target, WeightType::F16, 1).is_err());
    let error = llama::requantize(&model_path(SMOLLM), &target, WeightType::F16, 0).unwrap_err();
    assert_eq!(error.to_string(), "threads is 0, allowed 1 to 512");
    let nowhere = scratch.file("no/such/directory.gguf");
    assert!(llama::requantize(&model_path(SMOLLM), &nowhere, WeightType::F16, 1).is_err());
}

#[test]
fn session_sizes_out_of_range_are_named() {
    let model = model(SMOLLM);
    let good = SessionConfig { slots: 1, context_tokens: 64, batch_tokens_max: 64, threads: 1 };
    let decode = |config: SessionConfig| model.decode_session(&config).err().unwrap().to_string();
    assert_eq!(decode(SessionConfig { slots: 0, ..good.clone() }), "slots is 0, allowed 1 to 256");
    assert_eq!(decode(SessionConfig { slots: 257, ..good.clone() }), "slots is 257, allowed 1 to 256");
    assert_eq!(decode(SessionConfig { threads: 0, ..good.clone() }), "threads is 0, allowed 1 to 512");
    assert_eq!(
        decode(SessionConfig { context_tokens: 8193, ..good.clone() }),
        "context_tokens is 8193, allowed 1 to 8192"
    );
    assert_eq!(
        decode(SessionConfig { batch_tokens_max: 0, ..good.clone() }),
        "batch_tokens_max is 0, allowed 1 to 65536"
    );
    let two = model.prefill_session(&SessionConfig { slots: 2, ..good.clone() }).err().unwrap();
    assert_eq!(two.to_string(), "slots is 2, allowed 1 to 1");
    // The smallest of everything works.
    let least = SessionConfig { slots: 1, context_tokens: 1, batch_tokens_max: 1, threads: 1 };
    model.prefill_session(&least).unwrap();
    model.decode_session(&least).unwrap();
}

#[test]
fn both_demo_models_can_be_cut_into_blocks() {
    for (file, sections, layers) in [(SMOLLM, 1, 30), (GEMMA, 2, 18)] {
        let model = model(file);
        assert_eq!(model.blocks_supported(), Ok(()));
        let session = model.prefill_session(&config(1, 64)).unwrap();
        assert_eq!(session.layout().sections().len(), sections);
        assert_eq!(session.layout().parts().len(), 2 * layers);
    }
}

#[test]
fn vocabulary_without_weights_equals_that_of_the_loaded_model() {
    for file in [SMOLLM, GEMMA] {
        let alone = llama::load_vocabulary(&model_path(file)).unwrap();
        let loaded = model(file).vocabulary();
        let text = "Grüße, 世界! 👩‍👩‍👧 <|im_start|>user\n\t  two  blanks";
        for (bos, special) in [(false, false), (true, false), (true, true)] {
            assert_eq!(alone.tokenize(text, bos, special), loaded.tokenize(text, bos, special));
        }
        assert_eq!(alone.size(), loaded.size());
        assert_eq!(alone.chat_template(), loaded.chat_template());
        assert_eq!((alone.bos(), alone.eos()), (loaded.bos(), loaded.eos()));
        assert_eq!(alone.wants_bos(), loaded.wants_bos());
    }
}

#[test]
fn text_survives_a_round_trip_through_tokens() {
    for file in [SMOLLM, GEMMA] {
        let vocabulary = model(file).vocabulary();
        for text in ["", "a", "Grüße, 世界! 👩‍👩‍👧\r\n\t end", "<|im_start|> as text", "\0 zero"]
        {
            let tokens = vocabulary.tokenize(text, false, false);
            let bytes: Vec<u8> = tokens.iter().flat_map(|&token| vocabulary.piece(token, false)).collect();
            assert_eq!(String::from_utf8_lossy(&bytes), text, "{file}: {tokens:?}");
        }
    }
}

#[test]
fn control_tokens_are_read_and_shown_only_on_request() {
    let vocabulary = model(SMOLLM).vocabulary();
    let end = vocabulary.tokenize("<|im_end|>", false, true);
    assert_eq!(end.len(), 1);
    assert!(vocabulary.is_end(end[0]));
    assert_eq!(vocabulary.piece(end[0], true), b"<|im_end|>");
    assert_eq!(vocabulary.piece(end[0], false), b"");
    assert!(vocabulary.tokenize("<|im_end|>", false, false).len() > 1);
    let beyond = kv_block::Token(vocabulary.size() as u32);
    assert_eq!(vocabulary.piece(beyond, true), b"");
    assert!(!vocabulary.is_end(beyond));
}

#[test]
fn a_bos_is_added_once_and_only_where_the_model_wants_one() {
    let gemma = model(GEMMA).vocabulary();
    let bos = gemma.bos().unwrap();
    assert!(gemma.wants_bos());
    assert_eq!(gemma.tokenize("Hi", true, true)[0], bos);
    assert_eq!(gemma.tokenize("<bos>Hi", true, true), gemma.tokenize("Hi", true, true));
    assert_ne!(gemma.tokenize("Hi", false, true)[0], bos);
    let smollm = model(SMOLLM).vocabulary();
    assert!(!smollm.wants_bos());
    assert_eq!(smollm.tokenize("Hi", true, true), smollm.tokenize("Hi", false, true));
}

#[test]
fn long_runs_of_one_character_are_tokenized() {
    for file in [SMOLLM, GEMMA] {
        let vocabulary = model(file).vocabulary();
        for character in ["a", "7", " ", "\n", "!", "界"] {
            let text = character.repeat(100_000);
            assert!(!vocabulary.tokenize(&text, true, true).is_empty(), "{character:?}");
        }
    }
}
