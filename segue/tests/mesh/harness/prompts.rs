//! Prompts of a wanted length that no other prompt shares a block with.

const WORDS: [&str; 16] = [
    "river", "stone", "lamp", "quiet", "orange", "window", "table", "garden", "seven", "carpet", "silver",
    "music", "paper", "north", "cloud", "bridge",
];

/// About `words` words; different for every `salt` from the first words on.
pub(crate) fn long_prompt(salt: u64, words: usize) -> String {
    let mut state = salt.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut text = format!("Note {salt}.");
    for _ in 0..words {
        // xorshift: all that matters is that it differs and can be repeated.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        text.push(' ');
        text.push_str(WORDS[(state >> 33) as usize % WORDS.len()]);
    }
    text
}

/// A word that a model does not say by chance, different for every `index` below 64.
pub(crate) fn code_word(index: usize) -> String {
    const FIRST: [&str; 8] = ["QUOR", "VEXI", "ZUMB", "TRYX", "KLAV", "WOMP", "JISK", "BRUL"];
    const LAST: [&str; 8] = ["DAN", "FOLT", "GRIM", "HAKE", "LORB", "MINX", "PSAR", "SULK"];
    format!("{}{}", FIRST[index % 8], LAST[(index / 8 + index) % 8])
}
