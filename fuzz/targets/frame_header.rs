//! Frame headers: one encoding for each, sizes within their bound.
#![no_main]

use fuzz::{SMALL_BYTES, holding_at_most};
use kv_transfer::{FrameHeader, TransferError};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: [u8; FrameHeader::BYTES]| {
    match holding_at_most(SMALL_BYTES, || FrameHeader::decode(&bytes)) {
        Ok(header) => {
            assert_eq!(header.encode(), bytes);
            assert!((1..=FrameHeader::PAYLOAD_BYTES_MAX).contains(&header.raw_bytes));
            assert!(header.encoded_bytes <= FrameHeader::PAYLOAD_BYTES_MAX);
        }
        Err(TransferError::Malformed { .. } | TransferError::TooLarge { .. }) => {}
        Err(other) => panic!("{other}"),
    }
});
