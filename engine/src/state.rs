//! llama.cpp's state bytes of a sequence: read exactly, or not at all.
//!
//! ```text
//!  u32 magic, i32 sequence
//!  per section:  u32 n_stream
//!    per stream: u32 cell_count; 0: nothing more, else
//!      per cell:  i32 position, u32 1, i32 sequence
//!      u32 v_trans = 0, u32 n_layer, u32 n_rot_k, u32 n_rot_v
//!      per layer: i32 type, u64 row_bytes, K rows
//!      per layer: i32 type, u64 row_bytes, V rows      (absent in latent caches)
//! ```
//!
//! Nothing in the bytes says how many sections there are, or whether there are
//! V rows: [`StateFormat::probe`] finds the one reading of a one-token state
//! that accounts for every byte. From then on every state must have exactly
//! that form. Source: `llama-kv-cache.cpp`, `state_write*`.

use std::ops::Range;

use kv_block::{LayerSpec, Layout, RowSpec, Section};

use crate::EngineError;
use crate::rows::BlobFormat;

/// Everything in a state that is not cells or rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StateFormat {
    magic: u32,
    streams: u32,
    /// `n_rot_k` and `n_rot_v` of each section.
    rotations: Vec<(u32, u32)>,
    layout: Layout,
}

/// Which sequence's cells are expected where.
#[derive(Clone, Debug)]
pub(crate) struct Expected {
    pub(crate) sequence: u32,
    /// Stream that holds the cells; all others are empty.
    pub(crate) stream: u32,
    pub(crate) positions: Range<usize>,
}

/// Sections in one reading of a probe; also bounds the search.
const SECTIONS_MAX: usize = 16;
const ROW_BYTES_MAX: u64 = 1 << 20;
/// Ids of ggml's types end far below this.
const DTYPE_MAX: u32 = 256;

impl StateFormat {
    /// Reads the state of one token at position 0. Errors: `State` unless
    /// exactly one reading accounts for every byte.
    pub(crate) fn probe(bytes: &[u8], sequence: u32, stream: u32) -> Result<Self, EngineError> {
        let mut reader = Reader { bytes, at: 0 };
        let magic = reader.u32("magic")?;
        reader.expect("sequence", sequence)?;
        let streams = Reader { ..reader }.u32("stream count")?;
        let expected = Expected { sequence, stream, positions: 0..1 };
        let mut readings = Vec::new();
        read_sections(&reader, streams, &expected, &mut Vec::new(), &mut readings);
        let [reading] = <[Vec<ProbedSection>; 1]>::try_from(readings).map_err(|readings| {
            EngineError::State(format!(
                "the probe's {} bytes have {} possible readings, needed 1",
                bytes.len(),
                readings.len()
            ))
        })?;
        let rotations = reading.iter().map(|section| section.rotations).collect();
        let layout = Layout::new(reading.into_iter().map(|section| section.section).collect())?;
        Ok(Self { magic, streams, rotations, layout })
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Offset of each part's first row, in the order of `Layout::parts`.
    /// Errors: `State` for the first byte that is not as expected.
    pub(crate) fn parse(&self, bytes: &[u8], expected: &Expected) -> Result<Vec<usize>, EngineError> {
        let mut reader = Reader { bytes, at: 0 };
        reader.expect("magic", self.magic)?;
        reader.expect("sequence", expected.sequence)?;
        let mut offsets = Vec::with_capacity(self.layout.parts().len());
        for (section, &rotations) in self.layout.sections().iter().zip(&self.rotations) {
            reader.expect("stream count", self.streams)?;
            for stream in 0..self.streams {
                if stream == expected.stream {
                    let places = read_stream(&mut reader, section, rotations, expected)?;
                    offsets.extend(in_part_order(section, &places));
                } else {
                    reader.expect("cell count of another stream", 0)?;
                }
            }
        }
        reader.end()?;
        Ok(offsets)
    }

    /// As [`StateFormat::parse`], for the state of a whole context with one
    /// stream per sequence: it begins with the architecture's name, has no
    /// sequence of its own, and holds the neighbours' cells too, which are
    /// skipped. `residents` are their lengths.
    pub(crate) fn parse_whole(
        &self,
        bytes: &[u8],
        residents: &[usize],
        slot: usize,
    ) -> Result<Vec<usize>, EngineError> {
        let mut reader = Reader { bytes, at: 0 };
        let name_bytes = reader.u32("length of the architecture's name")? as usize;
        reader.skip("architecture's name", name_bytes)?;
        let mut offsets = Vec::with_capacity(self.layout.parts().len());
        for (section, &rotations) in self.layout.sections().iter().zip(&self.rotations) {
            reader.expect("stream count", self.streams)?;
            for (stream, &resident) in (0..self.streams).zip(residents) {
                if resident == 0 {
                    reader.expect("cell count", 0)?;
                    continue;
                }
                let expected = Expected { sequence: stream, stream, positions: 0..resident };
                let places = read_stream(&mut reader, section, rotations, &expected)?;
                if stream as usize == slot {
                    offsets.extend(in_part_order(section, &places));
                }
            }
        }
        reader.end()?;
        Ok(offsets)
    }

    /// A maker of blobs of this form.
    pub(crate) fn blob_format(&self) -> LlamaBlob {
        LlamaBlob { magic: self.magic, streams: self.streams, rotations: self.rotations.clone() }
    }
}

/// Offsets of a stream's K rows and V rows, by layer.
struct Places {
    k: Vec<usize>,
    v: Vec<usize>,
}

/// Layout order has K and V of a layer side by side, state order does not.
fn in_part_order(section: &Section, places: &Places) -> Vec<usize> {
    let mut v = places.v.iter();
    let mut offsets = Vec::new();
    for (layer, &k) in section.layers.iter().zip(&places.k) {
        offsets.push(k);
        offsets.extend(layer.v.and_then(|_| v.next()));
    }
    offsets
}

fn read_stream(
    reader: &mut Reader<'_>,
    section: &Section,
    rotations: (u32, u32),
    expected: &Expected,
) -> Result<Places, EngineError> {
    read_cells(reader, expected)?;
    // A stream without cells ends with their count.
    if expected.positions.is_empty() {
        let v = section.layers.iter().filter(|layer| layer.v.is_some()).count();
        return Ok(Places { k: vec![reader.at; section.layers.len()], v: vec![reader.at; v] });
    }
    reader.expect("v_trans (transposed V rows)", 0)?;
    reader.expect("layer count", section.layers.len() as u32)?;
    reader.expect("n_rot_k", rotations.0)?;
    reader.expect("n_rot_v", rotations.1)?;
    let count = expected.positions.len();
    let mut places = Places { k: Vec::new(), v: Vec::new() };
    for layer in &section.layers {
        places.k.push(reader.rows(layer.k, count)?);
    }
    for row in section.layers.iter().filter_map(|layer| layer.v) {
        places.v.push(reader.rows(row, count)?);
    }
    Ok(places)
}

fn read_cells(reader: &mut Reader<'_>, expected: &Expected) -> Result<(), EngineError> {
    reader.expect("cell count", expected.positions.len() as u32)?;
    for position in expected.positions.clone() {
        reader.expect("position", position as u32)?;
        reader.expect("sequences of a cell", 1)?;
        reader.expect("sequence of a cell", expected.sequence)?;
    }
    Ok(())
}

#[derive(Clone)]
struct ProbedSection {
    section: Section,
    rotations: (u32, u32),
}

/// Tries both forms of each section, with and without V rows, and keeps every
/// list of sections that ends where the bytes end.
fn read_sections(
    reader: &Reader<'_>,
    streams: u32,
    expected: &Expected,
    so_far: &mut Vec<ProbedSection>,
    readings: &mut Vec<Vec<ProbedSection>>,
) {
    if reader.at == reader.bytes.len() && !so_far.is_empty() {
        readings.push(so_far.clone());
        return;
    }
    if so_far.len() == SECTIONS_MAX {
        return;
    }
    for has_v in [true, false] {
        let mut ahead = Reader { ..*reader };
        if let Ok(section) = probe_section(&mut ahead, streams, expected, has_v) {
            so_far.push(section);
            read_sections(&ahead, streams, expected, so_far, readings);
            so_far.pop();
        }
    }
}

fn probe_section(
    reader: &mut Reader<'_>,
    streams: u32,
    expected: &Expected,
    has_v: bool,
) -> Result<ProbedSection, EngineError> {
    reader.expect("stream count", streams)?;
    let mut probed = None;
    for stream in 0..streams {
        if stream == expected.stream {
            probed = Some(probe_stream(reader, expected, has_v)?);
        } else {
            reader.expect("cell count of another stream", 0)?;
        }
    }
    probed.ok_or_else(|| EngineError::State(format!("no stream {} of {streams}", expected.stream)))
}

fn probe_stream(
    reader: &mut Reader<'_>,
    expected: &Expected,
    has_v: bool,
) -> Result<ProbedSection, EngineError> {
    read_cells(reader, expected)?;
    reader.expect("v_trans (transposed V rows)", 0)?;
    let at = reader.at;
    let layers = reader.u32("layer count")?;
    // Without layers both forms read the same bytes: sixteen such sections
    // would have 65,536 readings.
    if layers == 0 {
        return Err(EngineError::State(format!("layer count at byte {at} is 0, expected 1 or more")));
    }
    let rotations = (reader.u32("n_rot_k")?, reader.u32("n_rot_v")?);
    // Each turn consumes bytes, so a wild layer count ends with the bytes.
    let k = (0..layers).map(|_| reader.probe_row()).collect::<Result<Vec<_>, _>>()?;
    let v = (0..if has_v { layers } else { 0 }).map(|_| reader.probe_row()).collect::<Result<Vec<_>, _>>()?;
    let layers = (0..).zip(k).map(|(layer, k)| LayerSpec { k, v: v.get::<usize>(layer).copied() }).collect();
    Ok(ProbedSection { section: Section { layers }, rotations })
}

/// Reads forward; every field is checked against the bytes left.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self, what: &str) -> Result<[u8; N], EngineError> {
        let field = self.bytes.get(self.at..).and_then(|rest| rest.first_chunk::<N>());
        let field = *field.ok_or_else(|| self.ended(what))?;
        self.at += N;
        Ok(field)
    }

    fn u32(&mut self, what: &str) -> Result<u32, EngineError> {
        self.take(what).map(u32::from_le_bytes)
    }

    fn expect(&mut self, what: &str, value: u32) -> Result<(), EngineError> {
        let at = self.at;
        let found = self.u32(what)?;
        if found == value {
            return Ok(());
        }
        Err(EngineError::State(format!("{what} at byte {at} is {found}, expected {value}")))
    }

    fn skip(&mut self, what: &str, count: usize) -> Result<(), EngineError> {
        if count > self.bytes.len() - self.at {
            return Err(self.ended(what));
        }
        self.at += count;
        Ok(())
    }

    /// Skips `count` rows behind their header; returns where they begin.
    fn rows(&mut self, row: RowSpec, count: usize) -> Result<usize, EngineError> {
        self.expect("row type", row.dtype)?;
        let at = self.at;
        let row_bytes = u64::from_le_bytes(self.take("row bytes")?);
        if row_bytes != u64::from(row.row_bytes) {
            let expected = row.row_bytes;
            return Err(EngineError::State(format!(
                "row bytes at byte {at} are {row_bytes}, expected {expected}"
            )));
        }
        let start = self.at;
        self.skip("rows", row.row_bytes as usize * count)?;
        Ok(start)
    }

    /// One row of unknown type and width behind its header.
    fn probe_row(&mut self) -> Result<RowSpec, EngineError> {
        let at = self.at;
        let dtype = self.u32("row type")?;
        let row_bytes = u64::from_le_bytes(self.take("row bytes")?);
        if dtype > DTYPE_MAX || row_bytes == 0 || row_bytes > ROW_BYTES_MAX {
            return Err(EngineError::State(format!("no row at byte {at}: type {dtype}, {row_bytes} bytes")));
        }
        self.skip("row", row_bytes as usize)?;
        Ok(RowSpec { dtype, row_bytes: row_bytes as u32 })
    }

    fn end(&self) -> Result<(), EngineError> {
        if self.at == self.bytes.len() {
            return Ok(());
        }
        Err(EngineError::State(format!("{} bytes, expected {}", self.bytes.len(), self.at)))
    }

    fn ended(&self, what: &str) -> EngineError {
        EngineError::State(format!("ends at byte {} inside {what}", self.bytes.len()))
    }
}

/// Writes states of a probed form: all cells in stream 0, which llama.cpp
/// takes for the sequence that it is told to restore.
#[derive(Debug)]
pub(crate) struct LlamaBlob {
    magic: u32,
    streams: u32,
    rotations: Vec<(u32, u32)>,
}

impl BlobFormat for LlamaBlob {
    fn plan(&self, layout: &Layout, token_count: usize) -> (usize, Vec<usize>) {
        let mut writer = Writer { state: None, at: 0 };
        let offsets = self.write(layout, token_count, &mut writer);
        (writer.at, offsets)
    }

    fn write_structure(&self, layout: &Layout, token_count: usize, state: &mut [u8]) {
        self.write(layout, token_count, &mut Writer { state: Some(state), at: 0 });
    }
}

impl LlamaBlob {
    fn write(&self, layout: &Layout, token_count: usize, writer: &mut Writer<'_>) -> Vec<usize> {
        let mut offsets = Vec::with_capacity(layout.parts().len());
        writer.u32(self.magic);
        writer.u32(0);
        for (section, &rotations) in layout.sections().iter().zip(&self.rotations) {
            writer.u32(self.streams);
            writer.u32(token_count as u32);
            if token_count > 0 {
                let places = write_stream(writer, section, rotations, token_count);
                offsets.extend(in_part_order(section, &places));
            }
            (1..self.streams).for_each(|_| writer.u32(0));
        }
        if token_count == 0 {
            offsets = vec![writer.at; layout.parts().len()];
        }
        offsets
    }
}

fn write_stream(
    writer: &mut Writer<'_>,
    section: &Section,
    rotations: (u32, u32),
    token_count: usize,
) -> Places {
    for position in 0..token_count as u32 {
        writer.u32(position);
        writer.u32(1);
        writer.u32(0);
    }
    writer.u32(0);
    writer.u32(section.layers.len() as u32);
    writer.u32(rotations.0);
    writer.u32(rotations.1);
    let k = section.layers.iter().map(|layer| writer.rows(layer.k, token_count)).collect();
    let v =
        section.layers.iter().filter_map(|layer| layer.v).map(|row| writer.rows(row, token_count)).collect();
    Places { k, v }
}

/// Writes, or only counts when there is nothing to write to.
struct Writer<'a> {
    state: Option<&'a mut [u8]>,
    at: usize,
}

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) {
        if let Some(state) = self.state.as_deref_mut() {
            state[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        }
        self.at += bytes.len();
    }

    fn u32(&mut self, value: u32) {
        self.put(&value.to_le_bytes());
    }

    fn rows(&mut self, row: RowSpec, count: usize) -> usize {
        self.u32(row.dtype);
        self.put(&u64::from(row.row_bytes).to_le_bytes());
        let start = self.at;
        self.at += row.row_bytes as usize * count;
        start
    }
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
