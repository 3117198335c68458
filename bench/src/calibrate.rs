//! How many words make so many tokens, learnt from what the server counted for two prompts.

/// A straight line: tokens = fixed + per_word × words. The fixed part is the chat template, the salt
/// and the question.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Calibration {
    pub(crate) tokens_fixed: f64,
    pub(crate) tokens_per_word: f64,
}

/// For servers that report no usage: a common English word with its space is mostly one token.
pub(crate) const ASSUMED: Calibration = Calibration { tokens_fixed: 60.0, tokens_per_word: 1.1 };

impl Calibration {
    /// From two prompts of different length, each as (words, tokens). `None` if the counts make no
    /// sense, e.g. do not grow.
    pub(crate) fn from_two(few: (usize, u64), many: (usize, u64)) -> Option<Self> {
        let words = many.0.checked_sub(few.0).filter(|&words| words > 0)?;
        let tokens = many.1.checked_sub(few.1).filter(|&tokens| tokens > 0)?;
        let tokens_per_word = tokens as f64 / words as f64;
        Some(Self { tokens_fixed: few.1 as f64 - tokens_per_word * few.0 as f64, tokens_per_word })
    }

    /// Words for a prompt of about `tokens` tokens; `None` if the fixed part alone is longer.
    pub(crate) fn words_for(self, tokens: usize) -> Option<usize> {
        let words = ((tokens as f64 - self.tokens_fixed) / self.tokens_per_word).round();
        (words >= 1.0).then_some(words as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_prompts_give_the_line() {
        let line = Calibration::from_two((100, 170), (600, 770)).unwrap();
        assert_eq!(line, Calibration { tokens_fixed: 50.0, tokens_per_word: 1.2 });
        assert_eq!(line.words_for(4_300), Some(3_542));
    }

    #[test]
    fn counts_that_do_not_grow_are_refused() {
        assert_eq!(Calibration::from_two((100, 170), (600, 170)), None);
        assert_eq!(Calibration::from_two((100, 170), (100, 180)), None);
    }

    #[test]
    fn a_prompt_shorter_than_its_own_frame_is_refused() {
        assert_eq!(ASSUMED.words_for(40), None);
    }
}
