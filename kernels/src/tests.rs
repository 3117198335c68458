use bytes::Bytes;
use kv_block::RowSpec;
use proptest::prelude::*;

use super::*;

fn shape(row_bytes: u32, tokens: usize) -> RowsShape {
    RowsShape { row: RowSpec { dtype: 1, row_bytes }, tokens }
}

fn rows(bytes: usize) -> Bytes {
    (0..bytes).map(|i| (i * 31 + 7) as u8).collect()
}

#[test]
fn ids_are_unique_and_found() {
    for (index, codec) in codecs().iter().enumerate() {
        assert!(codecs()[..index].iter().all(|other| other.id() != codec.id()));
        assert!(codecs()[..index].iter().all(|other| other.name() != codec.name()));
        assert_eq!(super::codec(codec.id()).unwrap().name(), codec.name());
    }
}

#[test]
fn an_unknown_id_is_an_error() {
    assert_eq!(codec(u16::MAX).err(), Some(CodecError::Unknown(u16::MAX)));
}

#[test]
fn lossless_codecs_return_the_same_rows_at_tail_sizes() {
    for tokens in [0, 1, 2, 3, 63, 64] {
        let shape = shape(384, tokens);
        let source = rows(shape.raw_bytes());
        let payload = codec(RAW).unwrap().encode(shape, source.clone()).unwrap();
        let mut target = vec![0; shape.raw_bytes()];
        codec(RAW).unwrap().decode(shape, &payload, &mut target).unwrap();
        assert_eq!(target, source);
        assert_eq!(checksum(&target), checksum(&source));
    }
}

#[test]
fn raw_does_not_copy_when_it_encodes() {
    let source = rows(384);
    let payload = codec(RAW).unwrap().encode(shape(384, 1), source.clone()).unwrap();
    assert_eq!(payload.as_ptr(), source.as_ptr());
}

#[test]
fn a_payload_of_wrong_length_is_an_error_and_leaves_the_rows() {
    let shape = shape(16, 4);
    let mut target = vec![9; 64];
    let error = codec(RAW).unwrap().decode(shape, &[0; 63], &mut target);
    assert_eq!(error, Err(CodecError::Length { got: 63, expected: 64 }));
    assert_eq!(target, vec![9; 64]);
}

#[test]
fn rows_of_wrong_length_are_an_error() {
    let shape = shape(16, 4);
    let error = CodecError::Length { got: 65, expected: 64 };
    assert_eq!(codec(RAW).unwrap().encode(shape, rows(65)).as_ref(), Err(&error));
    assert_eq!(codec(RAW).unwrap().decode(shape, &rows(64), &mut [0; 65]), Err(error));
}

#[test]
fn an_absurd_shape_is_an_error() {
    let shape = shape(u32::MAX, usize::MAX);
    assert!(codec(RAW).unwrap().decode(shape, &[1], &mut [0]).is_err());
}

/// The value is wire format: other implementations must agree.
#[test]
fn the_checksum_is_xxh3_64() {
    assert_eq!(checksum(b""), 0x2d06_8005_38d3_94c2);
    assert_ne!(checksum(&[0]), checksum(&[0, 0]));
}

proptest! {
    #[test]
    fn decoding_any_payload_never_panics(
        id in 0u16..4,
        row_bytes in 1u32..64,
        tokens in 0usize..9,
        payload in proptest::collection::vec(any::<u8>(), 0..600),
    ) {
        let shape = shape(row_bytes, tokens);
        if let Ok(codec) = codec(id) {
            let mut target = vec![0; shape.raw_bytes()];
            let fits = codec.decode(shape, &payload, &mut target).is_ok();
            if codec.is_identity() {
                prop_assert_eq!(fits, payload.len() == target.len());
                prop_assert!(!fits || payload == target);
            }
        }
    }

    #[test]
    fn any_rows_survive_a_lossless_round_trip(
        row_bytes in 1u32..64,
        source in proptest::collection::vec(any::<u8>(), 0..600),
    ) {
        let tokens = source.len() / row_bytes as usize;
        let shape = shape(row_bytes, tokens);
        let source = Bytes::from(source).slice(..shape.raw_bytes());
        let payload = codec(RAW).unwrap().encode(shape, source.clone()).unwrap();
        let mut target = vec![0; shape.raw_bytes()];
        codec(RAW).unwrap().decode(shape, &payload, &mut target).unwrap();
        prop_assert_eq!(&target[..], &source[..]);
    }
}
