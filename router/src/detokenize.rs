//! Token bytes to text, never splitting a character.

use std::mem;

/// Collects bytes until they are whole characters.
#[derive(Debug, Default)]
pub(crate) struct Detokenizer {
    /// Start of a character that is not complete: at most 3 bytes.
    pending: Vec<u8>,
}

impl Detokenizer {
    /// The characters that `bytes` complete. Bytes that can never become a
    /// character give U+FFFD.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let bytes = mem::take(&mut self.pending);
        let mut text = String::with_capacity(bytes.len());
        let mut rest = bytes.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    return text;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    // Valid up to there, so nothing is replaced here.
                    text.push_str(&String::from_utf8_lossy(valid));
                    let Some(invalid) = error.error_len() else {
                        self.pending = after.to_vec();
                        return text;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &after[invalid..];
                }
            }
        }
    }

    /// Ends the text: an incomplete character becomes one U+FFFD.
    pub(crate) fn finish(&mut self) -> &'static str {
        if mem::take(&mut self.pending).is_empty() { "" } else { "\u{FFFD}" }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn collect<'a>(chunks: impl IntoIterator<Item = &'a [u8]>) -> String {
        let mut detokenizer = Detokenizer::default();
        let mut text: String = chunks.into_iter().map(|chunk| detokenizer.push(chunk)).collect();
        text.push_str(detokenizer.finish());
        text
    }

    #[test]
    fn a_character_split_over_tokens_comes_out_once_and_whole() {
        let mut detokenizer = Detokenizer::default();
        let parts: Vec<_> = "é🦀".as_bytes().chunks(1).map(|byte| detokenizer.push(byte)).collect();
        assert_eq!(parts, ["", "é", "", "", "", "🦀"]);
        assert_eq!(detokenizer.finish(), "");
    }

    #[test]
    fn an_incomplete_tail_becomes_one_replacement_character() {
        assert_eq!(collect([b"ok\xF0\x9F\xA6".as_slice()]), "ok\u{FFFD}");
    }

    #[test]
    fn bytes_that_are_no_character_are_replaced_and_the_rest_survives() {
        assert_eq!(collect([b"a\xFFb".as_slice(), b"\xC3", b"(c"]), "a\u{FFFD}b\u{FFFD}(c");
    }

    proptest! {
        #[test]
        fn text_is_the_same_however_it_is_cut(text: String, cuts in prop::collection::vec(1..5usize, 1..20)) {
            let mut rest = text.as_bytes();
            let mut chunks = Vec::new();
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (head, tail) = rest.split_at((*cut).min(rest.len()));
                chunks.push(head);
                rest = tail;
            }
            prop_assert_eq!(collect(chunks), text);
        }

        #[test]
        fn any_bytes_give_what_a_lossy_reading_gives(bytes: Vec<u8>, size in 1..4usize) {
            prop_assert_eq!(collect(bytes.chunks(size)), String::from_utf8_lossy(&bytes));
        }
    }
}
