//! Slots that hold rows and nothing else: what a sequence is, they must tell.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use kv_block::{Layout, SlotId, Token};

use super::vocabulary::{CORRUPT, FakeVocabulary};
use super::{Failure, Failures, FakeOptions, rows};
use crate::rows::BlobFormat;
use crate::{BatchItem, BlobTemplate, EngineError, ExportedRows, InstallBlob, Session, SessionConfig, batch};

pub(super) struct FakeSession {
    options: FakeOptions,
    layout: Arc<Layout>,
    template: Arc<BlobTemplate>,
    config: SessionConfig,
    /// Whether ranges can be exported, as from the real prefill session.
    unified: bool,
    failures: Arc<Failures>,
    slots: Vec<Slot>,
    logits: Vec<Option<Vec<f32>>>,
}

/// Rows of one sequence, an array per part.
#[derive(Clone)]
struct Slot {
    parts: Vec<Vec<u8>>,
    resident: usize,
    /// Rows already found to form one chain, and that chain's hash.
    verified: usize,
    chain: u64,
    corrupt: bool,
}

impl FakeSession {
    pub(super) fn new(
        options: FakeOptions,
        layout: Arc<Layout>,
        config: SessionConfig,
        unified: bool,
        failures: Arc<Failures>,
    ) -> Self {
        let template = Arc::new(BlobTemplate::new(layout.clone(), Box::new(FakeFormat)));
        let slots = vec![Slot::empty(&layout, options.seed); config.slots];
        Self { options, layout, template, config, unified, failures, slots, logits: Vec::new() }
    }

    fn slot(&self, slot: SlotId) -> &Slot {
        &self.slots[usize::from(slot.0)]
    }

    fn known(&self, slot: SlotId) -> Result<(), EngineError> {
        if usize::from(slot.0) < self.slots.len() {
            return Ok(());
        }
        Err(EngineError::Batch(format!("slot {} of {}", slot.0, self.slots.len())))
    }
}

impl Session for FakeSession {
    fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    fn blob_template(&self) -> Result<Arc<BlobTemplate>, EngineError> {
        if !self.options.blocks_supported {
            return Err(EngineError::BlocksUnsupported("the fake was told so".to_owned()));
        }
        Ok(self.template.clone())
    }

    fn config(&self) -> &SessionConfig {
        &self.config
    }

    fn resident(&self, slot: SlotId) -> usize {
        self.slot(slot).resident
    }

    fn step(&mut self, batch: &[BatchItem<'_>]) -> Result<(), EngineError> {
        batch::check(batch, &self.config, FakeVocabulary::SIZE, |slot| self.resident(slot))?;
        let tokens: usize = batch.iter().map(|item| item.tokens.len()).sum();
        host::step_time(self.options.step_time + self.options.token_time * tokens as u32);
        if self.failures.take(Failure::Step) {
            return Err(EngineError::Decode(-3));
        }
        self.logits.clear();
        for item in batch {
            let slot = &mut self.slots[usize::from(item.slot.0)];
            slot.verify(&self.layout);
            item.tokens.iter().for_each(|&token| slot.append(&self.layout, token));
            self.logits.push(item.logits.then(|| slot.logits(self.options.end_one_in)));
        }
        Ok(())
    }

    fn logits(&self, item: usize) -> &[f32] {
        self.logits[item].as_deref().expect("this item asked for logits")
    }

    fn export(&mut self, slot: SlotId, tokens: Range<usize>) -> Result<ExportedRows, EngineError> {
        self.known(slot)?;
        let held = self.slot(slot);
        batch::exportable(slot, &tokens, held.resident, self.unified)?;
        if self.failures.take(Failure::Export) {
            return Err(EngineError::State("the fake was told to fail".to_owned()));
        }
        let mut bytes = Vec::new();
        let mut offsets = Vec::new();
        for ((_, row), rows) in self.layout.parts().iter().zip(&held.parts) {
            let width = row.row_bytes as usize;
            offsets.push(bytes.len());
            bytes.extend_from_slice(&rows[tokens.start * width..tokens.end * width]);
        }
        ExportedRows::new(self.layout.clone(), tokens, Bytes::from(bytes), offsets.into())
    }

    fn install(&mut self, slot: SlotId, blob: &InstallBlob) -> Result<(), EngineError> {
        self.known(slot)?;
        batch::fits(slot, blob.token_count(), &self.config)?;
        if self.failures.take(Failure::Install) {
            return Err(EngineError::State("the fake was told to fail".to_owned()));
        }
        if blob.state()[..8] != MAGIC || blob.state().len() != self.template.blob_bytes(blob.token_count()) {
            return Err(EngineError::State("blob of another engine or layout".to_owned()));
        }
        let mut fresh = Slot::empty(&self.layout, self.options.seed);
        for (&(part, _), rows) in self.layout.parts().iter().zip(&mut fresh.parts) {
            let Some(bytes) = blob.rows(part, 0..blob.token_count()) else {
                return Err(EngineError::State(format!("blob without {part}")));
            };
            rows.extend_from_slice(bytes);
        }
        fresh.resident = blob.token_count();
        self.slots[usize::from(slot.0)] = fresh;
        Ok(())
    }

    fn truncate(&mut self, slot: SlotId, keep: usize) -> Result<(), EngineError> {
        self.known(slot)?;
        let resident = self.slot(slot).resident;
        if keep > resident {
            return Err(EngineError::Range { slot: slot.0, resident, start: 0, end: keep });
        }
        let held = &mut self.slots[usize::from(slot.0)];
        for ((_, row), rows) in self.layout.parts().iter().zip(&mut held.parts) {
            rows.truncate(keep * row.row_bytes as usize);
        }
        held.resident = keep;
        held.forget_verdict(self.options.seed);
        Ok(())
    }

    fn clear(&mut self, slot: SlotId) {
        self.slots[usize::from(slot.0)] = Slot::empty(&self.layout, self.options.seed);
    }
}

impl Slot {
    fn empty(layout: &Layout, seed: u64) -> Self {
        let parts = vec![Vec::new(); layout.parts().len()];
        Self { parts, resident: 0, verified: 0, chain: rows::root(seed), corrupt: false }
    }

    fn forget_verdict(&mut self, seed: u64) {
        self.verified = 0;
        self.chain = rows::root(seed);
        self.corrupt = false;
    }

    /// Looks at all rows that were not looked at yet.
    fn verify(&mut self, layout: &Layout) {
        while self.verified < self.resident && !self.corrupt {
            let position = self.verified;
            match rows::read_first(self.row(layout, 0, position), self.chain, position) {
                Some((chain, token)) if self.agrees(layout, chain, token, position) => {
                    self.chain = chain;
                    self.verified += 1;
                }
                _ => self.corrupt = true,
            }
        }
    }

    fn agrees(&self, layout: &Layout, chain: u64, token: Token, position: usize) -> bool {
        (1..self.parts.len())
            .all(|part| rows::matches(self.row(layout, part, position), part, chain, token, position))
    }

    fn append(&mut self, layout: &Layout, token: Token) {
        let position = self.resident;
        self.chain = rows::mix(self.chain, token, position);
        for (part, (_, row)) in layout.parts().iter().enumerate() {
            let start = self.parts[part].len();
            self.parts[part].resize(start + row.row_bytes as usize, 0);
            rows::write(&mut self.parts[part][start..], part, self.chain, token, position);
        }
        self.resident += 1;
        if !self.corrupt {
            self.verified = self.resident;
        }
    }

    fn logits(&self, end_one_in: u64) -> Vec<f32> {
        let winner = if self.corrupt { CORRUPT } else { rows::next_token(self.chain, end_one_in) };
        rows::logits(self.chain, winner)
    }

    fn row(&self, layout: &Layout, part: usize, position: usize) -> &[u8] {
        let width = layout.parts()[part].1.row_bytes as usize;
        &self.parts[part][position * width..(position + 1) * width]
    }
}

const MAGIC: [u8; 8] = *b"fakeblob";

/// Magic, token count, then each part's rows.
#[derive(Debug)]
struct FakeFormat;

impl BlobFormat for FakeFormat {
    fn plan(&self, layout: &Layout, token_count: usize) -> (usize, Vec<usize>) {
        let mut end = MAGIC.len() + size_of::<u64>();
        let offsets = layout
            .parts()
            .iter()
            .map(|(_, row)| {
                let start = end;
                end += token_count * row.row_bytes as usize;
                start
            })
            .collect();
        (end, offsets)
    }

    fn write_structure(&self, _layout: &Layout, token_count: usize, state: &mut [u8]) {
        state[..8].copy_from_slice(&MAGIC);
        state[8..16].copy_from_slice(&(token_count as u64).to_le_bytes());
    }
}
