//! Every message, each under its own kind byte.
#![no_main]

use fuzz::{SMALL_BYTES, holding_at_most};
use kv_transfer::{
    ControlMessage, Generate, HandoffMessage, Message, PrefillRequest, RequestEvent, TransferError,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    check::<ControlMessage>(bytes);
    check::<Generate>(bytes);
    check::<RequestEvent>(bytes);
    check::<PrefillRequest>(bytes);
    check::<HandoffMessage>(bytes);
});

fn check<M: Message>(bytes: &[u8]) {
    // A list of the smallest archived items, candidates with short names, grows
    // threefold; the encoding of the same again, doubled while it grows.
    let memory = 8 * bytes.len() + SMALL_BYTES;
    let message = match holding_at_most(memory, || M::decode(bytes)) {
        Ok(message) => message,
        Err(error) => {
            assert!(matches!(error, TransferError::Malformed { .. }), "{error}");
            // No addresses of this process.
            assert!(!error.to_string().contains("0x"), "{error}");
            return;
        }
    };
    assert_eq!(bytes[0], M::KIND);
    // Bytes are compared, not messages: a temperature may be NaN.
    let encoded = holding_at_most(memory, || message.encode());
    assert!(encoded.len() <= bytes.len(), "{} bytes hold a message of {}", bytes.len(), encoded.len());
    let again = M::decode(&encoded).expect("what was encoded decodes");
    assert_eq!(again.encode(), encoded);
}
