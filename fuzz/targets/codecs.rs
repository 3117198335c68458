//! Every codec: a payload gives rows or an error, and rows survive a round trip.
#![no_main]

use bytes::Bytes;
use fuzz::{SMALL_BYTES, choice, holding_at_most, numbers};
use kernels::{RowsShape, codecs};
use kv_block::RowSpec;
use libfuzzer_sys::fuzz_target;

/// Types of rows that engines have, and one that none has.
const DTYPES: [u32; 5] = [0, 1, 8, 30, 77];
/// Far above what a block of the corpus needs; a shape may ask for more than it gives.
const ROWS_BYTES_MAX: usize = 1 << 20;

fuzz_target!(|input: &[u8]| {
    let Some((which, rest)) = choice(input) else { return };
    let Some(([dtype, row_bytes, tokens], payload)) = numbers(rest) else { return };
    let codec = codecs()[usize::from(which) % codecs().len()];
    let row = RowSpec { dtype: DTYPES[dtype % DTYPES.len()], row_bytes: row_bytes as u32 };
    let shape = RowsShape { row, tokens };
    if shape.raw_bytes() > ROWS_BYTES_MAX {
        return;
    }
    let mut rows = vec![0xa5; shape.raw_bytes()];
    let memory = 8 * (payload.len() + rows.len()) + SMALL_BYTES;
    if holding_at_most(memory, || codec.decode(shape, payload, &mut rows)).is_err() {
        return;
    }
    if codec.is_identity() {
        assert_eq!(rows, payload);
    }
    // Whatever was decoded are rows like any other.
    let Ok(encoded) = codec.encode(shape, Bytes::from(rows.clone())) else { return };
    let mut again = vec![0; rows.len()];
    codec.decode(shape, &encoded, &mut again).expect("what was encoded decodes");
    if codec.is_identity() {
        assert_eq!(again, rows);
    }
});
