//! One token per byte and a handful of control tokens.

use kv_block::Token;

use crate::Vocabulary;

/// Begins every text.
pub const BOS: Token = Token(256);
/// Ends an answer.
pub const EOS: Token = Token(257);
/// Begins a turn of the chat template.
pub const TURN_START: Token = Token(258);
/// Ends a turn of the chat template, and an answer.
pub const TURN_END: Token = Token(259);
/// What a session says whose rows do not belong together.
pub const CORRUPT: Token = Token(260);

/// Control tokens and how they are written.
const SPECIAL: [(Token, &str); 4] =
    [(BOS, "<s>"), (EOS, "</s>"), (TURN_START, "<|im_start|>"), (TURN_END, "<|im_end|>")];

const CHAT_TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + \
     message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}\
     {{ '<|im_start|>assistant\n' }}{% endif %}";

/// Vocabulary of every [`super::FakeModel`].
#[derive(Clone, Copy, Debug, Default)]
pub struct FakeVocabulary;

impl FakeVocabulary {
    /// Number of tokens.
    pub const SIZE: usize = 261;
}

impl Vocabulary for FakeVocabulary {
    fn tokenize(&self, text: &str, add_bos: bool, parse_special: bool) -> Vec<Token> {
        let mut tokens = Vec::with_capacity(text.len() + 1);
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let special = SPECIAL.iter().find(|(_, written)| parse_special && rest.starts_with(written));
            if let Some(&(token, written)) = special {
                tokens.push(token);
                rest = &rest[written.len()..];
                continue;
            }
            let width = first.len_utf8();
            tokens.extend(rest.as_bytes()[..width].iter().map(|&byte| Token(u32::from(byte))));
            rest = &rest[width..];
        }
        if add_bos && tokens.first() != Some(&BOS) {
            tokens.insert(0, BOS);
        }
        tokens
    }

    fn piece(&self, token: Token, special: bool) -> Vec<u8> {
        if let Ok(byte) = u8::try_from(token.0) {
            return vec![byte];
        }
        if token == CORRUPT {
            return b"<corrupt>".to_vec();
        }
        match SPECIAL.iter().find(|(control, _)| special && *control == token) {
            Some((_, written)) => written.as_bytes().to_vec(),
            None => Vec::new(),
        }
    }

    fn is_end(&self, token: Token) -> bool {
        token == EOS || token == TURN_END
    }

    fn bos(&self) -> Option<Token> {
        Some(BOS)
    }

    fn eos(&self) -> Option<Token> {
        Some(EOS)
    }

    fn wants_bos(&self) -> bool {
        true
    }

    fn size(&self) -> usize {
        Self::SIZE
    }

    fn chat_template(&self) -> Option<&str> {
        Some(CHAT_TEMPLATE)
    }
}
