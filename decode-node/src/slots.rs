//! Who sits where: running sequences, and warm ones whose KV can be continued.

use kv_block::{BlockHash, BlockTable, ChainSeed, Fingerprint, IsolationKey, LayoutId, SlotId, Token};

/// What a slot holds.
#[derive(Clone, Debug, Default)]
struct Slot {
    running: bool,
    /// Tokens whose KV is resident, as far as they can be reused.
    warm: Vec<Token>,
    /// Hashes of the full blocks of `warm`.
    chain: Vec<BlockHash>,
    isolation: Option<IsolationKey>,
    /// Value of the table's version at release; the smallest is the least
    /// recently used.
    last_used: u64,
}

/// The slots of one session.
#[derive(Debug)]
pub struct SlotTable {
    slots: Vec<Slot>,
    version: u64,
    fingerprint: Fingerprint,
    layout: LayoutId,
    block_tokens: usize,
}

/// A slot handed out, with what it already holds of the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The slot.
    pub slot: SlotId,
    /// Leading prompt tokens whose KV is there.
    pub cached: usize,
}

impl SlotTable {
    /// `count` empty slots.
    pub fn new(count: usize, fingerprint: Fingerprint, layout: LayoutId, block_tokens: usize) -> Self {
        Self { slots: vec![Slot::default(); count], version: 0, fingerprint, layout, block_tokens }
    }

    /// Takes the free slot that holds the longest prefix of `prompt`; without
    /// one of at least a block, the one least worth keeping.
    ///
    /// The last prompt token always counts as not cached: its logits are needed.
    pub fn claim(&mut self, prompt: &[Token], isolation: IsolationKey) -> Option<Claim> {
        let prompt = &prompt[..prompt.len().saturating_sub(1)];
        let longest = self
            .free()
            .map(|(slot, held)| Claim { slot, cached: common(held, prompt, isolation) })
            .filter(|claim| claim.cached >= self.block_tokens)
            .max_by_key(|claim| (claim.cached, std::cmp::Reverse(claim.slot)));
        let claim = longest.or_else(|| {
            let slot = self.least_worth_keeping()?;
            Some(Claim { slot, cached: common(&self.slots[usize::from(slot.0)], prompt, isolation) })
        })?;
        self.occupy(claim.slot);
        Some(claim)
    }

    /// Takes the free slot whose content is worth least to others: for a
    /// sequence that brings its own KV.
    pub fn claim_empty(&mut self) -> Option<SlotId> {
        let slot = self.least_worth_keeping()?;
        self.occupy(slot);
        Some(slot)
    }

    /// Gives a slot back with `warm` resident and reusable; empty if cleared.
    pub fn release(&mut self, slot: SlotId, warm: Vec<Token>, isolation: IsolationKey) {
        self.version += 1;
        let chain = self.chain(&warm, isolation);
        self.slots[usize::from(slot.0)] =
            Slot { running: false, warm, chain, isolation: Some(isolation), last_used: self.version };
    }

    /// Slots with a running sequence.
    pub fn used(&self) -> usize {
        self.slots.iter().filter(|slot| slot.running).count()
    }

    /// Whether any slot is free.
    pub fn has_free(&self) -> bool {
        self.used() < self.slots.len()
    }

    /// For each slot the hashes of the full blocks that can be reused now.
    pub fn warm_chains(&self) -> Vec<Vec<BlockHash>> {
        self.slots.iter().map(|slot| slot.chain.clone()).collect()
    }

    /// Goes up whenever [`SlotTable::warm_chains`] may have changed.
    pub fn version(&self) -> u64 {
        self.version
    }

    fn chain(&self, warm: &[Token], isolation: IsolationKey) -> Vec<BlockHash> {
        let seed = ChainSeed::new(self.fingerprint, self.layout, isolation);
        let table = BlockTable::new(seed, warm, self.block_tokens);
        table.hashes()[..table.full_blocks()].to_vec()
    }

    /// An empty slot, or else one of the older half of the warm ones. Among
    /// these, one beside running sequences: the engine computes neighbours in one
    /// pass, and every gap between them costs another.
    fn least_worth_keeping(&self) -> Option<SlotId> {
        let mut free: Vec<_> = self.free().collect();
        free.sort_by_key(|(_, held)| (!held.warm.is_empty(), held.last_used));
        let empty = free.iter().filter(|(_, held)| held.warm.is_empty()).count();
        let open = if empty > 0 { empty } else { free.len().div_ceil(2) };
        let alone = |slot: SlotId| 2 - self.running_neighbours(slot);
        free[..open].iter().map(|(slot, _)| *slot).min_by_key(|slot| alone(*slot))
    }

    fn running_neighbours(&self, slot: SlotId) -> usize {
        let place = usize::from(slot.0);
        let sides = [place.checked_sub(1), place.checked_add(1)];
        sides.iter().flatten().filter_map(|&side| self.slots.get(side)).filter(|held| held.running).count()
    }

    fn free(&self) -> impl Iterator<Item = (SlotId, &Slot)> {
        (0u16..).map(SlotId).zip(&self.slots).filter(|(_, slot)| !slot.running)
    }

    fn occupy(&mut self, slot: SlotId) {
        let held = &mut self.slots[usize::from(slot.0)];
        held.running = true;
        held.warm = Vec::new();
        held.chain = Vec::new();
        self.version += 1;
    }
}

fn common(held: &Slot, prompt: &[Token], isolation: IsolationKey) -> usize {
    if held.isolation != Some(isolation) {
        return 0;
    }
    held.warm.iter().zip(prompt).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(slots: usize) -> SlotTable {
        SlotTable::new(slots, Fingerprint([1; 32]), LayoutId([2; 32]), 4)
    }

    fn tokens(range: std::ops::Range<u32>) -> Vec<Token> {
        range.map(Token).collect()
    }

    const SHARED: IsolationKey = IsolationKey::SHARED;

    #[test]
    fn the_longest_warm_prefix_is_continued() {
        let mut table = table(3);
        let (a, b) =
            (table.claim(&tokens(0..9), SHARED).unwrap(), table.claim(&tokens(50..60), SHARED).unwrap());
        table.release(a.slot, tokens(0..9), SHARED);
        table.release(b.slot, tokens(50..60), SHARED);
        assert_eq!(table.claim(&tokens(0..20), SHARED).unwrap(), Claim { slot: a.slot, cached: 9 });
        assert_eq!(table.claim(&tokens(50..60), SHARED).unwrap(), Claim { slot: b.slot, cached: 9 });
    }

    #[test]
    fn a_prefix_below_one_block_does_not_cost_others_their_warm_slot() {
        let mut table = table(2);
        let a = table.claim(&tokens(0..9), SHARED).unwrap();
        table.release(a.slot, tokens(0..9), SHARED);
        let other = [tokens(0..3), tokens(70..90)].concat();
        assert_ne!(table.claim(&other, SHARED).unwrap().slot, a.slot);
    }

    #[test]
    fn another_isolation_key_shares_nothing() {
        let mut table = table(1);
        let a = table.claim(&tokens(0..9), SHARED).unwrap();
        table.release(a.slot, tokens(0..9), SHARED);
        let theirs = table.claim(&tokens(0..9), IsolationKey::from_salt("theirs")).unwrap();
        assert_eq!(theirs.cached, 0);
    }

    #[test]
    fn full_table_gives_nothing_and_running_slots_are_not_warm() {
        let mut table = table(1);
        let a = table.claim(&tokens(0..9), SHARED).unwrap();
        assert!(!table.has_free() && table.used() == 1);
        assert_eq!(table.claim(&tokens(0..9), SHARED), None);
        assert_eq!(table.claim_empty(), None);
        assert_eq!(table.warm_chains(), [vec![]]);
        table.release(a.slot, tokens(0..9), SHARED);
        assert_eq!(table.warm_chains()[0].len(), 2, "9 tokens hold two full blocks of 4");
    }

    #[test]
    fn an_incoming_sequence_takes_the_slot_least_worth_keeping() {
        let mut table = table(3);
        let claims: Vec<_> = (0..2).map(|_| table.claim_empty().unwrap()).collect();
        for slot in &claims {
            table.release(*slot, tokens(0..9), SHARED);
        }
        let third = table.claim_empty().unwrap();
        assert!(!claims.contains(&third), "the empty one goes first");
        assert_eq!(table.claim_empty(), Some(claims[0]), "then the oldest");
    }

    #[test]
    fn sequences_sit_side_by_side_where_it_costs_no_warm_prefix() {
        let mut table = table(6);
        let claims: Vec<_> = (0..4).map(|_| table.claim_empty().unwrap()).collect();
        assert_eq!(claims, [0, 1, 2, 3].map(SlotId));
        for (index, slot) in [0, 1, 3].into_iter().enumerate() {
            let from = 100 * index as u32;
            table.release(SlotId(slot), tokens(from..from + 9), SHARED);
        }
        // Running: 2. Empty: 4, 5. Warm, oldest first: 0, 1, 3.
        assert_eq!(table.claim_empty(), Some(SlotId(4)), "empty, with no running neighbour anywhere");
        assert_eq!(table.claim_empty(), Some(SlotId(5)));
        assert_eq!(table.claim_empty(), Some(SlotId(1)), "of the older two the one beside slot 2");
        assert_eq!(table.claim_empty(), Some(SlotId(0)), "the older one of two");
        assert_eq!(table.claim_empty(), Some(SlotId(3)));
    }
}
