//! Rate of KV frames over loopback, both ends in one process.
//!
//! `cargo run --release -p kv-transfer --example loopback_rate -- [MTU_BYTES] [MIB]`
//! (defaults 6500 and 1024). Compare with 1200 to see what the packet size does.

use std::time::Instant;

use bytes::Bytes;
use kv_block::{BlockHash, HandoffId, Part, Side};
use kv_transfer::{
    Connection, Endpoint, FrameHeader, MTU_BYTES_MAX, MeshAuthority, Role, TransferError, Tuning,
};

/// Frames of one 64-token block of a 7B model's layer.
const FRAME_BYTES: usize = 128 << 10;
/// One chunk of a prompt per stream.
const FRAMES_PER_STREAM: usize = 64;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let mtu_bytes = arguments.next().map_or(Ok(MTU_BYTES_MAX), |text| text.parse())?;
    let mib: usize = arguments.next().map_or(Ok(1024), |text| text.parse())?;
    let streams = (mib << 20) / (FRAME_BYTES * FRAMES_PER_STREAM);

    let authority = MeshAuthority::generate();
    let tuning = Tuning { mtu_bytes };
    let local = "127.0.0.1:0".parse()?;
    let prefill = Endpoint::bind(local, &authority.issue("prefill-0", Role::Prefill), &tuning)?;
    let decode = Endpoint::bind(local, &authority.issue("decode-0", Role::Decode), &tuning)?;
    let (to_prefill, to_decode) =
        tokio::join!(decode.connect(prefill.local_address(), Role::Prefill), prefill.accept());
    let (to_prefill, to_decode) = (to_prefill?, to_decode.ok_or("endpoint closed")?);

    let start = now();
    let (sent, received) = tokio::join!(send(&to_decode, streams), receive(&to_prefill, streams));
    sent?;
    let bytes = received?;
    let seconds = start.elapsed().as_secs_f64();
    let (rtt, lost_packets) = to_decode.path();
    println!(
        "mtu {} of {mtu_bytes}: {:.0} MB/s ({bytes} bytes in {seconds:.2} s, {lost_packets} packets lost, rtt {rtt:?})",
        to_decode.mtu_bytes(),
        bytes as f64 / seconds / 1e6,
    );
    Ok(())
}

async fn send(connection: &Connection, streams: usize) -> Result<(), TransferError> {
    let payload = Bytes::from(vec![0x5a; FRAME_BYTES]);
    let header = FrameHeader {
        handoff: HandoffId([1; 16]),
        block_index: 0,
        block_hash: BlockHash([2; 32]),
        part: Part { section: 0, layer: 0, side: Side::K },
        codec: 0,
        raw_bytes: FRAME_BYTES as u32,
        encoded_bytes: FRAME_BYTES as u32,
        checksum: 0,
    };
    for _ in 0..streams {
        let mut writer = connection.open_frames().await?;
        for _ in 0..FRAMES_PER_STREAM {
            writer.send(&header, payload.clone()).await?;
        }
        writer.finish();
    }
    Ok(())
}

async fn receive(connection: &Connection, streams: usize) -> Result<usize, TransferError> {
    let mut place = vec![0; FRAME_BYTES];
    let mut bytes = 0;
    for _ in 0..streams {
        let mut reader = connection.accept_frames().await?;
        while let Some(header) = reader.next_header().await? {
            reader.read_payload(&mut place).await?;
            bytes += header.encoded_bytes as usize;
        }
    }
    Ok(bytes)
}

#[expect(clippy::disallowed_methods, reason = "a measurement needs a clock")]
fn now() -> Instant {
    Instant::now()
}
