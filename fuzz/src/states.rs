//! States as llama.cpp writes them, small.

use engine::fuzzing::ProbedFormat;

/// A form with two sections of two layers, the second with keys only.
pub fn two_sections() -> ProbedFormat {
    ProbedFormat::probe(&state(1, 0, 0), 0, 0).expect("it is a probe")
}

/// The state of one token at position 0 in `stream` of `streams`.
pub fn state(streams: u32, sequence: u32, stream: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut put = |words: &[u32]| words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
    put(&[0x1234, sequence]);
    for sides in [2, 1] {
        put(&[streams]);
        for other in 0..streams {
            if other != stream {
                put(&[0]);
                continue;
            }
            // One cell, then: V not transposed, two layers, no rotations.
            put(&[1, 0, 1, sequence, 0, 2, 0, 0]);
            // F16, eight bytes each.
            (0..2 * sides).for_each(|row| put(&[1, 8, 0, row, 0xabcd]));
        }
    }
    bytes
}

/// The state of a whole context with one stream per sequence.
pub fn whole(residents: [u32; 2]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(5u32.to_le_bytes());
    bytes.extend(b"llama");
    let mut put = |words: &[u32]| words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
    for sides in [2, 1] {
        put(&[2]);
        for (sequence, count) in (0..).zip(residents) {
            put(&[count]);
            if count == 0 {
                continue;
            }
            (0..count).for_each(|position| put(&[position, 1, sequence]));
            put(&[0, 2, 0, 0]);
            for row in 0..2 * sides {
                put(&[1, 8, 0]);
                (0..count).for_each(|token| put(&[row, token]));
            }
        }
    }
    bytes
}
