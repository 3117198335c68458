//! Name and role in a peer's certificate.
#![no_main]

use fuzz::{SMALL_BYTES, TREE_FACTOR, holding_at_most};
use kv_transfer::check_node_name;
use kv_transfer::fuzzing::identity_of;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|der: &[u8]| {
    let memory = TREE_FACTOR * der.len() + SMALL_BYTES;
    if let Ok((name, _)) = holding_at_most(memory, || identity_of(der)) {
        // It becomes a file name and a log field.
        check_node_name(&name).expect("a name that a node may have");
    }
});
