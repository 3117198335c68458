//! What the engine sessions hold: which prompt uses each, and which tokens'
//! KV is in it. Tokens stay after their prompt is done or dropped, so that a
//! prompt with the same beginning goes on there.

use std::ops::Range;
use std::sync::Arc;

use kv_block::{IsolationKey, Token};

use crate::scheduler::PromptId;

/// The sessions, by index.
#[derive(Debug)]
pub(crate) struct Residents {
    residents: Vec<Resident>,
    block_tokens: usize,
    /// Goes up with every use; the smallest stamp is the least recently used.
    clock: u64,
}

#[derive(Clone, Debug)]
struct Resident {
    user: Option<PromptId>,
    isolation: IsolationKey,
    /// The session holds the KV of the first `held` of these.
    tokens: Arc<[Token]>,
    held: usize,
    used: u64,
}

impl Residents {
    pub(crate) fn new(count: usize, block_tokens: usize) -> Self {
        let empty =
            Resident { user: None, isolation: IsolationKey::SHARED, tokens: Arc::from([]), held: 0, used: 0 };
        Self { residents: vec![empty; count], block_tokens, clock: 0 }
    }

    pub(crate) fn used(&self) -> usize {
        self.residents.iter().filter(|resident| resident.user.is_some()).count()
    }

    pub(crate) fn has_idle(&self) -> bool {
        self.residents.iter().any(|resident| resident.user.is_none())
    }

    /// Tokens that all sessions hold.
    pub(crate) fn held_tokens(&self) -> usize {
        self.residents.iter().map(|resident| resident.held).sum()
    }

    pub(crate) fn held(&self, index: usize) -> usize {
        self.residents[index].held
    }

    /// Gives an idle session to `user`: the one that shares the longest prefix
    /// with `tokens`, else the least recently used. Returns its index and the
    /// tokens that it can keep. Panics if none is idle.
    pub(crate) fn take(
        &mut self,
        user: PromptId,
        tokens: &Arc<[Token]>,
        isolation: IsolationKey,
    ) -> (usize, usize) {
        let (index, kept) = (0..self.residents.len())
            .filter(|&index| self.residents[index].user.is_none())
            .map(|index| (index, self.residents[index].shared_prefix(tokens, isolation, self.block_tokens)))
            .max_by_key(|&(index, kept)| (kept, std::cmp::Reverse(self.residents[index].used)))
            .expect("an idle session");
        self.clock += 1;
        self.residents[index] =
            Resident { user: Some(user), isolation, tokens: tokens.clone(), held: kept, used: self.clock };
        (index, kept)
    }

    /// The engine computed `range` of `tokens` in session `index`. It did so even
    /// if its user has been dropped since.
    pub(crate) fn grew(&mut self, index: usize, tokens: &Arc<[Token]>, range: Range<usize>) {
        let resident = &mut self.residents[index];
        debug_assert!(Arc::ptr_eq(&resident.tokens, tokens), "session given away while it computed");
        debug_assert_eq!(resident.held, range.start);
        resident.held = range.end;
    }

    /// The engine cleared session `index`.
    pub(crate) fn cleared(&mut self, index: usize) {
        self.residents[index].held = 0;
    }

    /// The prompt is done or dropped; what it computed stays.
    pub(crate) fn release(&mut self, index: usize) {
        self.clock += 1;
        self.residents[index].user = None;
        self.residents[index].used = self.clock;
    }
}

impl Resident {
    /// Leading tokens in common: whole blocks, or the whole prompt.
    fn shared_prefix(&self, tokens: &[Token], isolation: IsolationKey, block_tokens: usize) -> usize {
        if self.isolation != isolation {
            return 0;
        }
        let held = &self.tokens[..self.held];
        let common = held.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        if common == tokens.len() { common } else { common / block_tokens * block_tokens }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(ids: Range<u32>) -> Arc<[Token]> {
        ids.map(Token).collect()
    }

    fn run(
        residents: &mut Residents,
        id: u64,
        tokens: &Arc<[Token]>,
        isolation: IsolationKey,
    ) -> (usize, usize) {
        let (index, kept) = residents.take(PromptId(id), tokens, isolation);
        residents.grew(index, tokens, kept..tokens.len());
        residents.release(index);
        (index, kept)
    }

    #[test]
    fn longest_shared_prefix_wins_else_least_recently_used() {
        let mut residents = Residents::new(2, 16);
        let (a, b) = (tokens(0..100), tokens(1000..1100));
        assert_eq!(run(&mut residents, 1, &a, IsolationKey::SHARED).1, 0);
        assert_eq!(run(&mut residents, 2, &b, IsolationKey::SHARED).1, 0);
        let longer = tokens(0..120);
        let (index, kept) = run(&mut residents, 3, &longer, IsolationKey::SHARED);
        assert_eq!(kept, 96, "whole blocks of the 100 shared tokens");
        let fresh = run(&mut residents, 4, &tokens(5000..5010), IsolationKey::SHARED);
        assert_ne!(fresh.0, index, "the session used last keeps its tokens");
    }

    #[test]
    fn a_prompt_held_whole_is_kept_whole() {
        let mut residents = Residents::new(1, 16);
        run(&mut residents, 1, &tokens(0..100), IsolationKey::SHARED);
        assert_eq!(run(&mut residents, 2, &tokens(0..90), IsolationKey::SHARED).1, 90);
    }

    #[test]
    fn another_isolation_key_shares_nothing() {
        let mut residents = Residents::new(1, 16);
        run(&mut residents, 1, &tokens(0..100), IsolationKey::SHARED);
        assert_eq!(run(&mut residents, 2, &tokens(0..100), IsolationKey::from_salt("b")).1, 0);
    }
}
