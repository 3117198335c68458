//! Slots of a llama.cpp context.
//!
//! A prefill session keeps its prompt in sequence 0 of a unified context;
//! sequence 1 is a scratch name for the cells of the range being exported. In
//! a decode session every slot is a sequence with a stream of its own, so that
//! attention does not walk the neighbours' cells; there only whole sequences
//! can be exported.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use kv_block::{LayerSpec, Layout, RowSpec, Section, SlotId};

use crate::ffi::{ContextSizes, LogitsPlace, RawContext, RawModel};
use crate::state::{Expected, StateFormat};
use crate::{BatchItem, BlobTemplate, EngineError, ExportedRows, InstallBlob, Session, SessionConfig, batch};

/// What a session is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// One prompt, exports ranges.
    Prefill,
    /// Many sequences, installs prefixes.
    Decode,
    /// Many sequences of a model that cannot be cut into blocks, for the reason given.
    DecodeOnly(String),
}

pub(super) struct LlamaSession {
    context: RawContext,
    config: SessionConfig,
    mode: Mode,
    window_tokens: usize,
    vocabulary_size: usize,
    layout: Arc<Layout>,
    blocks: Result<Blocks, String>,
    /// Tokens in each slot.
    residents: Vec<usize>,
    /// The last step's logits, by batch item.
    logits: Vec<Option<Logits>>,
}

/// Logits of one batch item.
enum Logits {
    /// Still where the last pass of the step left them.
    InPlace(LogitsPlace),
    /// Saved from an earlier pass.
    Saved(Vec<f32>),
}

struct Blocks {
    format: StateFormat,
    template: Arc<BlobTemplate>,
}

/// The resident prompt of a prefill session, and the name of exported ranges.
const RESIDENT: i32 = 0;
const SCRATCH: i32 = 1;

/// Tokens decoded to see that ranges can be cut out and forgotten.
const PROBE_TOKENS: usize = 4;

impl LlamaSession {
    /// `config` was checked. Errors: `Session` if there is no memory for it,
    /// `State` if the probe finds another state than this code knows.
    pub(super) fn new(model: Arc<RawModel>, config: SessionConfig, mode: Mode) -> Result<Self, EngineError> {
        let window_tokens = model.window_tokens();
        let vocabulary_size = model.vocabulary_size();
        let context = RawContext::new(model, sizes(&config, &mode)?).map_err(EngineError::Session)?;
        let residents = vec![0; config.slots];
        let mut session = Self {
            context,
            mode,
            window_tokens,
            vocabulary_size,
            layout: Arc::new(opaque_layout()?),
            blocks: Err(String::new()),
            residents,
            logits: Vec::new(),
            config,
        };
        match session.mode.clone() {
            Mode::DecodeOnly(reason) => session.blocks = Err(reason),
            Mode::Prefill | Mode::Decode => session.probe()?,
        }
        Ok(session)
    }

    /// Finds the layout, and tries on a few tokens what will be done to many.
    fn probe(&mut self) -> Result<(), EngineError> {
        let slot = SlotId(0);
        self.append_probe(1)?;
        let format = StateFormat::probe(&self.context.state(RESIDENT), 0, 0)?;
        self.layout = Arc::new(format.layout().clone());
        let template = Arc::new(BlobTemplate::new(self.layout.clone(), Box::new(format.blob_format())));
        self.blocks = Ok(Blocks { format, template });
        let more = PROBE_TOKENS.min(self.config.context_tokens).min(self.config.batch_tokens_max + 1) - 1;
        if more > 0 {
            self.append_probe(more)?;
            if self.mode == Mode::Prefill {
                self.export(slot, 1..1 + more)?;
            }
            self.truncate(slot, 1)?;
        }
        let rows = self.export(slot, 0..1)?;
        drop(rows);
        self.clear(slot);
        self.logits.clear();
        Ok(())
    }

    fn append_probe(&mut self, count: usize) -> Result<(), EngineError> {
        let tokens = vec![kv_block::Token(0); count];
        self.step(&[BatchItem { slot: SlotId(0), tokens: &tokens, logits: false }])
    }

    /// Computes the items of one pass. Returns llama.cpp's code, 0 if all went well.
    fn compute_pass(&mut self, batch: &[BatchItem<'_>], pass: &[usize], last: bool) -> i32 {
        let raw = self.context.batch();
        let mut ends = Vec::with_capacity(pass.len());
        for item in pass.iter().map(|&index| &batch[index]) {
            let resident = self.residents[usize::from(item.slot.0)];
            let end = item.tokens.len() - 1;
            for (index, token) in item.tokens.iter().enumerate() {
                raw.push(token.0, resident + index, i32::from(item.slot.0), item.logits && index == end);
            }
            ends.push(raw.len() - 1);
        }
        let code = self.context.decode();
        if code != 0 {
            return code;
        }
        for (&index, end) in pass.iter().zip(ends).filter(|(index, _)| batch[**index].logits) {
            self.logits[index] = self.context.logits_place(end).map(Logits::InPlace);
        }
        if !last {
            // The next pass overwrites the buffer.
            for &index in pass {
                if let Some(Logits::InPlace(place)) = &self.logits[index] {
                    self.logits[index] = Some(Logits::Saved(self.context.logits(place).to_vec()));
                }
            }
        }
        0
    }

    fn blocks(&self) -> Result<&Blocks, EngineError> {
        self.blocks.as_ref().map_err(|reason| EngineError::BlocksUnsupported(reason.clone()))
    }

    fn known(&self, slot: SlotId) -> Result<usize, EngineError> {
        let index = usize::from(slot.0);
        if index < self.config.slots {
            return Ok(index);
        }
        Err(EngineError::Batch(format!("slot {} of {}", slot.0, self.config.slots)))
    }

    /// Longest range whose cells llama.cpp writes into one state: it leaves out
    /// what lies outside the window of the state's last token.
    fn piece_tokens(&self) -> usize {
        if self.window_tokens == 0 { usize::MAX } else { self.window_tokens }
    }

    fn export_piece(&mut self, tokens: Range<usize>) -> Result<(Vec<u8>, Vec<usize>), EngineError> {
        self.context.share(RESIDENT, SCRATCH, tokens.start as i32, tokens.end as i32);
        let bytes = self.context.state(SCRATCH);
        self.context.remove(SCRATCH, 0);
        let expected = Expected { sequence: SCRATCH as u32, stream: 0, positions: tokens };
        let offsets = self.blocks()?.format.parse(&bytes, &expected)?;
        Ok((bytes, offsets))
    }

    fn export_range(&mut self, tokens: Range<usize>) -> Result<ExportedRows, EngineError> {
        // Cut at multiples of the window, which suits sliding and chunked windows.
        let pieces = cut(tokens.clone(), self.piece_tokens());
        if let [_] = pieces[..] {
            let (bytes, offsets) = self.export_piece(tokens.clone())?;
            return ExportedRows::new(self.layout.clone(), tokens, Bytes::from(bytes), offsets.into());
        }
        let mut exported = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let (bytes, offsets) = self.export_piece(piece.clone())?;
            exported.push((piece, bytes, offsets));
        }
        let mut bytes = Vec::with_capacity(self.layout.bytes_per_token() as usize * tokens.len());
        let mut offsets = Vec::with_capacity(self.layout.parts().len());
        for (part, (_, row)) in self.layout.parts().iter().enumerate() {
            offsets.push(bytes.len());
            for (piece, state, places) in &exported {
                let rows = places[part]..places[part] + piece.len() * row.row_bytes as usize;
                bytes.extend_from_slice(&state[rows]);
            }
        }
        ExportedRows::new(self.layout.clone(), tokens, Bytes::from(bytes), offsets.into())
    }

    fn export_sequence(&mut self, slot: usize) -> Result<ExportedRows, EngineError> {
        let resident = self.residents[slot];
        let (bytes, offsets) = if resident <= self.piece_tokens() {
            let bytes = self.context.state(slot as i32);
            let expected = Expected { sequence: slot as u32, stream: slot as u32, positions: 0..resident };
            let offsets = self.blocks()?.format.parse(&bytes, &expected)?;
            (bytes, offsets)
        } else {
            // Only the state of the whole context has the rows behind the window.
            let bytes = self.context.whole_state();
            let offsets = self.blocks()?.format.parse_whole(&bytes, &self.residents, slot)?;
            (bytes, offsets)
        };
        ExportedRows::new(self.layout.clone(), 0..resident, Bytes::from(bytes), offsets.into())
    }
}

impl Session for LlamaSession {
    fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    fn blob_template(&self) -> Result<Arc<BlobTemplate>, EngineError> {
        Ok(self.blocks()?.template.clone())
    }

    fn config(&self) -> &SessionConfig {
        &self.config
    }

    fn resident(&self, slot: SlotId) -> usize {
        self.residents[usize::from(slot.0)]
    }

    fn step(&mut self, batch: &[BatchItem<'_>]) -> Result<(), EngineError> {
        batch::check(batch, &self.config, self.vocabulary_size, |slot| self.resident(slot))?;
        self.logits.clear();
        self.logits.resize_with(batch.len(), || None);
        let passes = batch::passes(batch);
        for (index, pass) in passes.iter().enumerate() {
            let code = self.compute_pass(batch, pass, index + 1 == passes.len());
            if code != 0 {
                // Some of the batch may be in the cache already.
                for item in batch {
                    self.context.remove(i32::from(item.slot.0), self.residents[usize::from(item.slot.0)]);
                }
                return Err(EngineError::Decode(code));
            }
        }
        for item in batch {
            self.residents[usize::from(item.slot.0)] += item.tokens.len();
        }
        Ok(())
    }

    fn logits(&self, item: usize) -> &[f32] {
        match self.logits[item].as_ref().expect("this item asked for logits") {
            Logits::InPlace(place) => self.context.logits(place),
            Logits::Saved(row) => row,
        }
    }

    fn export(&mut self, slot: SlotId, tokens: Range<usize>) -> Result<ExportedRows, EngineError> {
        let index = self.known(slot)?;
        self.blocks()?;
        let ranges = self.mode == Mode::Prefill;
        batch::exportable(slot, &tokens, self.residents[index], ranges)?;
        if ranges { self.export_range(tokens) } else { self.export_sequence(index) }
    }

    fn install(&mut self, slot: SlotId, blob: &InstallBlob) -> Result<(), EngineError> {
        let index = self.known(slot)?;
        batch::fits(slot, blob.token_count(), &self.config)?;
        let blocks = self.blocks()?;
        // The structure of a blob is ours, but maybe of another session's form.
        let expected = Expected { sequence: 0, stream: 0, positions: 0..blob.token_count() };
        if blob.token_count() > 0 {
            blocks.format.parse(blob.state(), &expected)?;
        }
        self.clear(slot);
        if blob.token_count() == 0 {
            return Ok(());
        }
        if !self.context.set_state(i32::from(slot.0), blob.state()) {
            self.clear(slot);
            let reason = crate::ffi::take_error("llama.cpp refuses the rows");
            return Err(EngineError::State(reason));
        }
        self.residents[index] = blob.token_count();
        Ok(())
    }

    fn truncate(&mut self, slot: SlotId, keep: usize) -> Result<(), EngineError> {
        let index = self.known(slot)?;
        let resident = self.residents[index];
        if keep > resident {
            return Err(EngineError::Range { slot: slot.0, resident, start: 0, end: keep });
        }
        if !self.context.remove(i32::from(slot.0), keep) {
            return Err(EngineError::State("this model cannot forget a part of a sequence".to_owned()));
        }
        self.residents[index] = keep;
        Ok(())
    }

    fn clear(&mut self, slot: SlotId) {
        let index = usize::from(slot.0);
        // A whole sequence can always be removed.
        self.context.remove(i32::from(slot.0), 0);
        self.residents[index] = 0;
    }
}

fn sizes(config: &SessionConfig, mode: &Mode) -> Result<ContextSizes, EngineError> {
    let too_many = || EngineError::Session("slots × context_tokens is beyond 32 bits".to_owned());
    let unified = *mode == Mode::Prefill;
    // llama.cpp rounds the cells of a stream up to this, see GGML_PAD in llama-context.cpp.
    let cells = config.context_tokens.next_multiple_of(256).checked_mul(config.slots).ok_or_else(too_many)?;
    let slots = config.slots as u32;
    Ok(ContextSizes {
        cells: u32::try_from(cells).ok().filter(|&cells| cells < 1 << 31).ok_or_else(too_many)?,
        batch_tokens: config.batch_tokens_max.min(cells) as u32,
        sequences: if unified { 2 } else { slots },
        outputs: slots,
        threads: config.threads as i32,
        unified,
    })
}

/// `tokens` cut at multiples of `piece`.
fn cut(tokens: Range<usize>, piece: usize) -> Vec<Range<usize>> {
    let mut pieces = Vec::new();
    let mut start = tokens.start;
    while start < tokens.end {
        let end = (start / piece).saturating_add(1).saturating_mul(piece).min(tokens.end);
        pieces.push(start..end);
        start = end;
    }
    pieces
}

/// Stands for a cache whose rows are not known. Its sessions give out no blob
/// template, so no row of it is ever asked for.
fn opaque_layout() -> Result<Layout, EngineError> {
    let row = RowSpec { dtype: u32::MAX, row_bytes: 1 };
    Ok(Layout::new(vec![Section { layers: vec![LayerSpec { k: row, v: None }] }])?)
}
