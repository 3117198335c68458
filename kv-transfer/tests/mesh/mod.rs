//! Two nodes on loopback, for the tests of this folder.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]

use std::net::SocketAddr;
use std::time::Duration;

use kv_block::{BlockHash, HandoffId, Part, Side};
use kv_transfer::*;

pub fn local() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

pub fn bind(authority: &MeshAuthority, name: &str, role: Role) -> Endpoint {
    Endpoint::bind(local(), &authority.issue(name, role), &Tuning::default()).unwrap()
}

/// A decode node connected to a prefill node.
pub struct Pair {
    pub decode: Endpoint,
    pub prefill: Endpoint,
    pub to_prefill: Connection,
    pub to_decode: Connection,
}

pub async fn pair() -> Pair {
    let authority = MeshAuthority::generate();
    let prefill = bind(&authority, "prefill-0", Role::Prefill);
    let decode = bind(&authority, "decode-0", Role::Decode);
    let (to_prefill, to_decode) =
        tokio::join!(decode.connect(prefill.local_address(), Role::Prefill), prefill.accept());
    Pair { decode, prefill, to_prefill: to_prefill.unwrap(), to_decode: to_decode.unwrap() }
}

pub fn header(block_index: u32, bytes: usize) -> FrameHeader {
    FrameHeader {
        handoff: HandoffId([1; 16]),
        block_index,
        block_hash: BlockHash([2; 32]),
        part: Part { section: 0, layer: 3, side: Side::V },
        codec: 0,
        raw_bytes: bytes.max(1) as u32,
        encoded_bytes: bytes as u32,
        checksum: 5,
    }
}

/// Fails the test instead of letting it hang.
pub async fn within<T>(seconds: u64, what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(Duration::from_secs(seconds), future).await {
        Ok(value) => value,
        Err(_) => panic!("{what} took more than {seconds} s"),
    }
}
