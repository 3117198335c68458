//! From exported rows to frames. Runs off the engine thread.

use bytes::Bytes;
use engine::ExportedRows;
use kernels::{CodecError, RowsShape};
use kv_block::{Part, RowSpec};
use kv_transfer::FrameHeader;

use crate::request::Job;

/// All frames of one block, in layout order.
#[derive(Debug)]
pub(crate) struct EncodedBlock {
    pub(crate) index: usize,
    pub(crate) bytes: u64,
    pub(crate) frames: Vec<(FrameHeader, Bytes)>,
    /// Last block of its chunk: the frame stream ends after it.
    pub(crate) ends_chunk: bool,
}

/// Encodes all blocks of a chunk. `rows` starts at a block boundary.
pub(crate) fn encode_chunk(job: &Job, rows: &ExportedRows) -> Result<Vec<EncodedBlock>, CodecError> {
    let tokens = rows.tokens();
    let block_tokens = job.table.block_tokens();
    let blocks = tokens.start / block_tokens..tokens.end.div_ceil(block_tokens);
    blocks.clone().map(|index| encode_block(job, rows, index, index + 1 == blocks.end)).collect()
}

fn encode_block(
    job: &Job,
    rows: &ExportedRows,
    index: usize,
    ends_chunk: bool,
) -> Result<EncodedBlock, CodecError> {
    let frames = job
        .layout
        .parts()
        .iter()
        .map(|&(part, row)| encode_part(job, rows, index, part, row))
        .collect::<Result<Vec<_>, _>>()?;
    let bytes = frames.iter().map(|(_, payload)| payload.len() as u64).sum();
    Ok(EncodedBlock { index, bytes, frames, ends_chunk })
}

fn encode_part(
    job: &Job,
    rows: &ExportedRows,
    index: usize,
    part: Part,
    row: RowSpec,
) -> Result<(FrameHeader, Bytes), CodecError> {
    let tokens = job.table.tokens_of(index);
    let shape = RowsShape { row, tokens: tokens.len() };
    let rows = rows.rows(part, tokens);
    let raw_bytes = rows.len() as u32;
    // The receiver checks decoded rows; every codec is lossless so far.
    let checksum = kernels::checksum(&rows);
    let (codec, payload) = encode_rows(job, shape, rows)?;
    let header = FrameHeader {
        handoff: job.handoff,
        block_index: index as u32,
        block_hash: job.table.hash(index).expect("block of the prompt"),
        part,
        codec,
        raw_bytes,
        encoded_bytes: payload.len() as u32,
        checksum,
    };
    Ok((header, payload))
}

/// With the chosen codec, or raw for a shape that it cannot take.
fn encode_rows(job: &Job, shape: RowsShape, rows: Bytes) -> Result<(u16, Bytes), CodecError> {
    match job.codec.encode(shape, rows.clone()) {
        Ok(payload) => Ok((job.codec.id(), payload)),
        Err(_) if job.raw_allowed => {
            let raw = kernels::codec(kernels::RAW)?;
            Ok((raw.id(), raw.encode(shape, rows)?))
        }
        Err(error) => Err(error),
    }
}
