//! Rows of peers reach row areas and nothing else, wherever they say they belong.
#![no_main]

use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use engine::ExportedRows;
use engine::fuzzing::{ProbedFormat, state_of};
use fuzz::{SMALL_BYTES, choice, holding_at_most, numbers};
use kv_block::{Part, Side};
use libfuzzer_sys::fuzz_target;

static PROBED: LazyLock<ProbedFormat> = LazyLock::new(fuzz::states::two_sections);

fuzz_target!(|input: &[u8]| {
    let Some((count, input)) = choice(input) else { return };
    install(usize::from(count), input);
    export(usize::from(count), input);
});

fn install(count: usize, mut input: &[u8]) {
    let format = &*PROBED;
    let template = format.template();
    let mut blob = template.blob(count);
    while let Some(([section, layer, start, end], rest)) = numbers(input) {
        let side = if layer % 2 == 0 { Side::K } else { Side::V };
        let part = Part { section: section as u16, layer: (layer / 2) as u16, side };
        input = rest;
        let Some(place) = blob.rows_mut(part, start..end) else {
            assert!(format.layout().row(part).is_none() || start > end || end > count);
            continue;
        };
        let row_bytes = format.layout().row(part).expect("the part has a place").row_bytes as usize;
        assert_eq!(place.len(), (end - start) * row_bytes);
        let filled = place.len().min(input.len());
        place[..filled].copy_from_slice(&input[..filled]);
        input = &input[filled..];
    }
    let parsed = format.parse(state_of(&blob), 0, 0, 0..count);
    assert!(parsed.is_ok(), "rows changed the structure: {parsed:?}");
    let shorter = blob.prefix(&template, count / 2);
    for &(part, _) in format.layout().parts() {
        assert_eq!(shorter.rows(part, 0..count / 2), blob.rows(part, 0..count / 2));
    }
}

fn export(count: usize, input: &[u8]) {
    let layout = Arc::new(PROBED.layout().clone());
    let parts = layout.parts().len();
    let Some((head, rows)) = input.split_at_checked(8 * parts) else { return };
    let offset = |bytes: &[u8]| usize::from_le_bytes(bytes.try_into().expect("chunks of eight"));
    let offsets: Arc<[usize]> = head.chunks_exact(8).map(offset).collect();
    let bytes = Bytes::copy_from_slice(rows);
    let export = || ExportedRows::new(layout.clone(), 3..3 + count, bytes, offsets);
    let Ok(exported) = holding_at_most(SMALL_BYTES, export) else { return };
    for &(part, row) in layout.parts() {
        assert_eq!(exported.rows(part, 3..3 + count).len(), row.row_bytes as usize * count);
    }
}
