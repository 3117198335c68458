//! PEM files of a node or an authority: one of them is the input, the others are good.
#![no_main]

use std::sync::LazyLock;

use fuzz::choice;
use kv_transfer::fuzzing::{authority, credentials};
use kv_transfer::{MeshAuthority, Role, check_node_name};
use libfuzzer_sys::fuzz_target;

/// Files of a fresh authority and of a node: no key needs to lie in the corpus.
struct Good {
    authority: String,
    authority_key: String,
    certificate: String,
    key: String,
}

static GOOD: LazyLock<Good> = LazyLock::new(|| {
    let dir = std::env::temp_dir().join(format!("segue-fuzz-credentials-{}", std::process::id()));
    let mesh = MeshAuthority::generate();
    mesh.save(&dir).expect("the authority is saved");
    mesh.issue("node", Role::Decode).save(&dir, "node").expect("the node is saved");
    let read = |file| std::fs::read_to_string(dir.join(file)).expect("the file is there");
    let good = Good {
        authority: read("ca.pem"),
        authority_key: read("ca.key"),
        certificate: read("node.pem"),
        key: read("node.key"),
    };
    std::fs::remove_dir_all(&dir).expect("own directory");
    good
});

fuzz_target!(|input: &[u8]| {
    let Some((place, text)) = choice(input) else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let good = &*GOOD;
    let identity = match place % 5 {
        0 => credentials(text, &good.certificate, &good.key),
        1 => credentials(&good.authority, text, &good.key),
        2 => credentials(&good.authority, &good.certificate, text),
        3 => return drop(authority(text, &good.authority_key)),
        _ => return drop(authority(&good.authority, text)),
    };
    match identity {
        Ok((name, _)) => check_node_name(&name).expect("a name that a node may have"),
        Err(error) => assert!(error.to_string().contains(".pem: ") || error.to_string().contains(".key: ")),
    }
});
