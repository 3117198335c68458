//! Rows of the fake cache: written from a chain hash, and checked against it.

use kv_block::Token;

use super::vocabulary::{EOS, FakeVocabulary};

/// The chain after a token: everything before it is in `previous`.
pub(super) fn mix(previous: u64, token: Token, position: usize) -> u64 {
    splitmix(previous ^ splitmix(u64::from(token.0) << 32 | position as u64))
}

/// The chain before the first token.
pub(super) fn root(seed: u64) -> u64 {
    splitmix(seed ^ 0x5e67_7565)
}

pub(super) fn chain_of(seed: u64, tokens: &[Token]) -> u64 {
    (0..).zip(tokens).fold(root(seed), |chain, (position, &token)| mix(chain, token, position))
}

/// The greedy token behind a chain: a small letter, a blank, or the end.
pub(super) fn next_token(chain: u64, end_one_in: u64) -> Token {
    let draw = splitmix(chain ^ 0x0a75_3e12);
    if end_one_in > 0 && draw.is_multiple_of(end_one_in) {
        return EOS;
    }
    let letter = (draw >> 32) % 27;
    Token(if letter == 26 { u32::from(b' ') } else { u32::from(b'a') + letter as u32 })
}

/// Logits with [`next_token`] on top and the rest a small repeatable noise.
pub(super) fn logits(chain: u64, winner: Token) -> Vec<f32> {
    let mut logits: Vec<f32> = (0..FakeVocabulary::SIZE as u64)
        .map(|token| (splitmix(chain ^ token) % 1000) as f32 / 1000.0)
        .collect();
    logits[winner.0 as usize] = 10.0;
    logits
}

/// Writes the row of part number `part` for the token that led to `chain`.
pub(super) fn write(row: &mut [u8], part: usize, chain: u64, token: Token, position: usize) {
    row[..8].copy_from_slice(&(chain ^ part_key(part)).to_le_bytes());
    row[8..12].copy_from_slice(&token.0.to_le_bytes());
    row[12..16].copy_from_slice(&(position as u32).to_le_bytes());
    let mut state = chain ^ part_key(part);
    for bytes in row[16..].chunks_mut(8) {
        state = splitmix(state);
        bytes.copy_from_slice(&state.to_le_bytes()[..bytes.len()]);
    }
}

/// The chain after the row of part 0, if the row continues `previous` there.
pub(super) fn read_first(row: &[u8], previous: u64, position: usize) -> Option<(u64, Token)> {
    let token = Token(u32::from_le_bytes(row[8..12].try_into().ok()?));
    let chain = mix(previous, token, position);
    matches(row, 0, chain, token, position).then_some((chain, token))
}

/// Whether `row` is exactly what `write` gives.
pub(super) fn matches(row: &[u8], part: usize, chain: u64, token: Token, position: usize) -> bool {
    let mut expected = vec![0; row.len()];
    write(&mut expected, part, chain, token, position);
    row == expected
}

fn part_key(part: usize) -> u64 {
    splitmix(0x9a27 + part as u64)
}

/// Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators".
fn splitmix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
