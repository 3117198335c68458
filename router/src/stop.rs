//! Stop strings, found wherever token borders fall.
//!
//! Text that may be the start of a stop string is held back until it is clear
//! whether it is. The match that *ends* first wins, so the result does not
//! depend on how the text was cut into pieces.

use std::mem;

/// Looks for stop strings in a growing text.
#[derive(Debug, Default)]
pub(crate) struct StopScanner {
    stops: Vec<String>,
    /// Longest end of the text so far that begins some stop string.
    held: String,
}

/// What a piece of text leads to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Scanned {
    /// This text is safe to send.
    Text(String),
    /// This text precedes a stop string; nothing may follow.
    Stopped(String),
}

impl StopScanner {
    /// Empty strings never match.
    pub(crate) fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        Self { stops, held: String::new() }
    }

    /// Appends a piece of text.
    pub(crate) fn push(&mut self, piece: &str) -> Scanned {
        if self.stops.is_empty() {
            return Scanned::Text(piece.to_owned());
        }
        let mut text = mem::take(&mut self.held);
        text.push_str(piece);
        if let Some(start) = self.first_match(&text) {
            text.truncate(start);
            return Scanned::Stopped(text);
        }
        self.held = text.split_off(self.safe_bytes(&text));
        Scanned::Text(text)
    }

    /// Ends the text: what was held back was no stop string after all.
    pub(crate) fn finish(&mut self) -> String {
        mem::take(&mut self.held)
    }

    /// Start of the match that ends first; the longest of those that end there.
    fn first_match(&self, text: &str) -> Option<usize> {
        let matches = self.stops.iter().filter_map(|stop| Some((text.find(stop.as_str())?, stop.len())));
        matches.min_by_key(|(start, bytes)| (start + bytes, *start)).map(|(start, _)| start)
    }

    /// Bytes before the longest end of `text` that begins a stop string.
    fn safe_bytes(&self, text: &str) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let from = (text.len() + 1).saturating_sub(longest);
        let begins_stop = |index: usize| {
            text.get(index..).is_some_and(|end| self.stops.iter().any(|stop| stop.starts_with(end)))
        };
        (from..text.len()).find(|&index| begins_stop(index)).unwrap_or(text.len())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Everything sent, and whether a stop string was found.
    fn scan(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let stops: Vec<_> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut scanner = StopScanner::new(&stops);
        let mut sent = String::new();
        for piece in pieces {
            match scanner.push(piece) {
                Scanned::Text(text) => sent.push_str(&text),
                Scanned::Stopped(text) => return (sent + &text, true),
            }
        }
        sent.push_str(&scanner.finish());
        (sent, false)
    }

    #[test]
    fn a_stop_string_over_several_pieces_never_leaks() {
        assert_eq!(
            scan(&["beta gamma"], &["alpha ", "be", "ta ", "gam", "ma", " delta"]),
            ("alpha ".into(), true)
        );
    }

    #[test]
    fn text_held_back_for_nothing_is_sent_once() {
        assert_eq!(scan(&["\nUser:"], &["hi\nUs", "ers"]), ("hi\nUsers".into(), false));
        assert_eq!(scan(&["\nUser:"], &["hi", "\nUse"]), ("hi\nUse".into(), false));
    }

    #[test]
    fn a_false_start_may_hide_the_real_one() {
        assert_eq!(scan(&["aab"], &["a", "a", "a", "b"]), ("a".into(), true));
    }

    #[test]
    fn empty_stop_strings_never_end_anything() {
        assert_eq!(scan(&["", ""], &["a", "b"]), ("ab".into(), false));
    }

    #[test]
    fn characters_of_several_bytes_are_not_split() {
        assert_eq!(scan(&["🦀🦀"], &["é", "🦀", "x"]), ("é🦀x".into(), false));
        assert_eq!(scan(&["é!"], &["éé", "!"]), ("é".into(), true));
    }

    proptest! {
        #[test]
        fn the_result_does_not_depend_on_the_pieces(
            text in "[abc]{0,24}",
            stops in prop::collection::vec("[abc]{1,4}", 0..4),
            size in 1..6usize,
        ) {
            let stops: Vec<_> = stops.iter().map(String::as_str).collect();
            let bytes: Vec<_> = text.as_bytes().chunks(size).collect();
            let pieces: Vec<_> = bytes.iter().map(|piece| std::str::from_utf8(piece).unwrap()).collect();
            let (sent, stopped) = scan(&stops, &pieces);
            prop_assert_eq!((sent.clone(), stopped), scan(&stops, &[text.as_str()]));
            prop_assert!(text.starts_with(&sent));
            prop_assert!(!stops.iter().any(|stop| sent.contains(stop)));
            prop_assert_eq!(stopped, stops.iter().any(|stop| text.contains(stop)));
            if !stopped {
                prop_assert_eq!(sent, text);
            }
        }
    }
}
