//! States made by `LlamaBlob`, and by hand, read back, cut and damaged.

use kv_block::{LayerSpec, Layout, RowSpec, Section};
use proptest::prelude::*;

use super::{Expected, SECTIONS_MAX, StateFormat};
use crate::rows::BlobFormat;

/// Two sections; the second one has keys only in a latent cache.
fn layout(latent: bool) -> Layout {
    let k = RowSpec { dtype: 1, row_bytes: 6 };
    let v = RowSpec { dtype: 1, row_bytes: 4 };
    let plain = Section { layers: vec![LayerSpec { k, v: Some(v) }; 2] };
    let second = Section { layers: vec![LayerSpec { k, v: (!latent).then_some(v) }; 3] };
    Layout::new(vec![plain, second]).unwrap()
}

fn format(streams: u32, latent: bool) -> StateFormat {
    StateFormat { magic: 0x1234, streams, rotations: vec![(0, 0), (0, 64)], layout: layout(latent) }
}

/// The state of `count` tokens at positions from 0, with rows that are not zero.
fn state(format: &StateFormat, count: usize) -> Vec<u8> {
    let (bytes, _) = format.blob_format().plan(&format.layout, count);
    let mut state = vec![0xab; bytes];
    format.blob_format().write_structure(&format.layout, count, &mut state);
    state
}

fn whole(count: usize) -> Expected {
    Expected { sequence: 0, stream: 0, positions: 0..count }
}

#[test]
fn probe_finds_the_one_reading_with_and_without_value_rows() {
    for latent in [false, true] {
        for streams in [1, 8] {
            let format = format(streams, latent);
            assert_eq!(StateFormat::probe(&state(&format, 1), 0, 0).unwrap(), format);
        }
    }
}

#[test]
fn blob_offsets_are_where_the_parser_finds_the_rows() {
    for count in [1, 2, 63, 300] {
        let format = format(4, true);
        let (_, planned) = format.blob_format().plan(&format.layout, count);
        assert_eq!(format.parse(&state(&format, count), &whole(count)).unwrap(), planned);
    }
}

#[test]
fn a_state_without_tokens_parses_like_any_other() {
    for streams in [1, 8] {
        let format = format(streams, true);
        let bytes = state(&format, 0);
        let offsets = format.parse(&bytes, &whole(0)).unwrap();
        assert_eq!(offsets.len(), format.layout.parts().len());
        assert!(offsets.iter().all(|&offset| offset <= bytes.len()));
        assert!(format.parse(&state(&format, 1), &whole(0)).is_err());
    }
}

#[test]
fn state_of_other_tokens_is_named_by_its_first_wrong_field() {
    let format = format(1, false);
    let bytes = state(&format, 3);
    let refused = |expected: &Expected| format.parse(&bytes, expected).unwrap_err().to_string();
    assert_eq!(refused(&whole(4)), "state: cell count at byte 12 is 3, expected 4");
    let later = Expected { positions: 1..4, ..whole(3) };
    assert_eq!(refused(&later), "state: position at byte 16 is 0, expected 1");
    let other = Expected { sequence: 1, ..whole(3) };
    assert_eq!(refused(&other), "state: sequence at byte 4 is 0, expected 1");
}

#[test]
fn transposed_value_rows_are_refused() {
    let format = format(1, false);
    let mut bytes = state(&format, 1);
    bytes[28] = 1;
    let error = format.parse(&bytes, &whole(1)).unwrap_err().to_string();
    assert_eq!(error, "state: v_trans (transposed V rows) at byte 28 is 1, expected 0");
    assert!(StateFormat::probe(&bytes, 0, 0).is_err());
}

#[test]
fn wild_counts_end_with_the_bytes() {
    let format = format(1, false);
    let mut bytes = state(&format, 1);
    // The layer count.
    bytes[32..36].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(StateFormat::probe(&bytes, 0, 0).is_err());
    // The stream count.
    bytes[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(StateFormat::probe(&bytes, 0, 0).is_err());
}

#[test]
fn sections_without_layers_have_no_reading() {
    let mut bytes = Vec::new();
    let mut put = |words: &[u32]| words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
    put(&[0x1234, 0]);
    // One stream with one cell, V not transposed, no layers, no rotations.
    (0..SECTIONS_MAX).for_each(|_| put(&[1, 1, 0, 1, 0, 0, 0, 0, 0]));
    let error = StateFormat::probe(&bytes, 0, 0).unwrap_err().to_string();
    assert_eq!(error, "state: the probe's 584 bytes have 0 possible readings, needed 1");
}

/// The bytes of a state that are structure, not rows.
fn structure(format: &StateFormat, count: usize) -> Vec<usize> {
    let (bytes, offsets) = format.blob_format().plan(&format.layout, count);
    let mut is_row = vec![false; bytes];
    for ((_, row), start) in format.layout.parts().iter().zip(offsets) {
        is_row[start..start + row.row_bytes as usize * count].fill(true);
    }
    (0..bytes).filter(|&at| !is_row[at]).collect()
}

proptest! {
    #[test]
    fn truncated_states_are_errors(count in 1usize..20, streams in 1u32..4, cut in any::<prop::sample::Index>()) {
        let format = format(streams, false);
        let bytes = state(&format, count);
        let cut = cut.index(bytes.len());
        prop_assert!(format.parse(&bytes[..cut], &whole(count)).is_err());
        prop_assert!(StateFormat::probe(&bytes[..cut], 0, 0).is_err());
    }

    #[test]
    fn longer_states_are_errors(count in 1usize..20, more in prop::collection::vec(any::<u8>(), 1..40)) {
        let format = format(1, false);
        let mut bytes = state(&format, count);
        bytes.extend(more);
        prop_assert!(format.parse(&bytes, &whole(count)).is_err());
    }

    #[test]
    fn damaged_structure_is_an_error(
        count in 1usize..20,
        streams in 1u32..4,
        latent in any::<bool>(),
        place in any::<prop::sample::Index>(),
        flip in 1u8..,
    ) {
        let format = format(streams, latent);
        let mut bytes = state(&format, count);
        let at = *place.get(&structure(&format, count));
        bytes[at] ^= flip;
        prop_assert!(format.parse(&bytes, &whole(count)).is_err(), "byte {}", at);
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let format = format(2, false);
        prop_assert!(format.parse(&bytes, &whole(1)).is_err());
        prop_assert!(format.parse_whole(&bytes, &[1, 2], 0).is_err());
        let _ = StateFormat::probe(&bytes, 0, 0);
    }

    #[test]
    fn damaged_probes_never_panic(place in any::<prop::sample::Index>(), value in any::<u8>()) {
        let format = format(2, true);
        let mut bytes = state(&format, 1);
        let at = place.index(bytes.len());
        bytes[at] = value;
        let _ = StateFormat::probe(&bytes, 0, 0);
    }
}
