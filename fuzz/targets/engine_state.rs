//! llama.cpp's state bytes: read exactly or not at all, and written back the same.
#![no_main]

use std::sync::LazyLock;

use engine::fuzzing::{ProbedFormat, state_of};
use fuzz::{SMALL_BYTES, choice, holding_at_most};
use libfuzzer_sys::fuzz_target;

static PROBED: LazyLock<ProbedFormat> = LazyLock::new(fuzz::states::two_sections);
static TWO_STREAMS: LazyLock<ProbedFormat> =
    LazyLock::new(|| ProbedFormat::probe(&fuzz::states::state(2, 0, 0), 0, 0).expect("it is a probe"));

fuzz_target!(|input: &[u8]| {
    let Some((how, bytes)) = choice(input) else { return };
    match how {
        0..16 => probe(bytes, u32::from(how % 4), u32::from(how / 4)),
        16..64 => parse(bytes, usize::from(how - 16)),
        _ => parse_whole(bytes, [usize::from(how % 3), usize::from(how / 3 % 3)], usize::from(how / 9 % 2)),
    }
});

fn probe(bytes: &[u8], sequence: u32, stream: u32) {
    let memory = 64 * bytes.len() + SMALL_BYTES;
    let Ok(format) = holding_at_most(memory, || ProbedFormat::probe(bytes, sequence, stream)) else { return };
    let offsets = format.parse(bytes, sequence, stream, 0..1).expect("a probe is a state");
    let row_bytes: u64 = format.layout().bytes_per_token();
    assert!(row_bytes <= bytes.len() as u64);
    let mut blob = format.template().blob(1);
    for (&(part, row), start) in format.layout().parts().iter().zip(offsets) {
        let rows = &bytes[start..start + row.row_bytes as usize];
        blob.rows_mut(part, 0..1).expect("own part").copy_from_slice(rows);
    }
    // Blobs have their cells in stream 0.
    if (sequence, stream) == (0, 0) {
        assert_eq!(state_of(&blob), bytes);
    }
    assert_eq!(state_of(&blob).len(), bytes.len());
}

fn parse(bytes: &[u8], count: usize) {
    let format = &*PROBED;
    let memory = 8 * bytes.len() + SMALL_BYTES;
    let Ok(offsets) = holding_at_most(memory, || format.parse(bytes, 0, 0, 0..count)) else { return };
    let mut blob = format.template().blob(count);
    copy_rows(format, bytes, &offsets, count, &mut blob);
    assert_eq!(state_of(&blob), bytes);
}

fn parse_whole(bytes: &[u8], residents: [usize; 2], slot: usize) {
    let format = &*TWO_STREAMS;
    let memory = 8 * bytes.len() + SMALL_BYTES;
    let read = holding_at_most(memory, || format.parse_whole(bytes, &residents, slot));
    let Ok(offsets) = read else { return };
    if residents[slot] == 0 {
        assert!(offsets.is_empty());
        return;
    }
    let mut blob = format.template().blob(residents[slot]);
    copy_rows(format, bytes, &offsets, residents[slot], &mut blob);
}

fn copy_rows(
    format: &ProbedFormat,
    bytes: &[u8],
    offsets: &[usize],
    count: usize,
    blob: &mut engine::InstallBlob,
) {
    if count == 0 {
        return;
    }
    assert_eq!(offsets.len(), format.layout().parts().len());
    for (&(part, row), &start) in format.layout().parts().iter().zip(offsets) {
        let rows = &bytes[start..start + row.row_bytes as usize * count];
        blob.rows_mut(part, 0..count).expect("own part and range").copy_from_slice(rows);
    }
}
