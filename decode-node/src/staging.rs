//! The memory that handoffs under way may take.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Granularity: a semaphore counts in `u32`, so bytes are counted in pages.
const PAGE_BYTES: u64 = 64 << 10;

/// A budget in bytes, served in order of asking.
#[derive(Clone, Debug)]
pub(crate) struct Staging {
    pages: Arc<Semaphore>,
    pages_max: u32,
}

impl Staging {
    pub(crate) fn new(bytes: u64) -> Self {
        let pages_max = u32::try_from(bytes / PAGE_BYTES).unwrap_or(u32::MAX).max(1);
        Self { pages: Arc::new(Semaphore::new(pages_max as usize)), pages_max }
    }

    /// Waits for room; `None` at once if `bytes` can never fit.
    pub(crate) async fn reserve(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let pages =
            u32::try_from((bytes as u64).div_ceil(PAGE_BYTES)).ok().filter(|p| *p <= self.pages_max)?;
        self.pages.clone().acquire_many_owned(pages).await.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_can_never_fit_is_refused_at_once_and_room_comes_back() {
        let staging = Staging::new(1 << 20);
        assert!(staging.reserve((1 << 20) + 1).await.is_none());
        let held = staging.reserve(1 << 20).await.unwrap();
        let waiting = tokio::time::timeout(std::time::Duration::from_millis(20), staging.reserve(1)).await;
        assert!(waiting.is_err(), "the budget is spent");
        drop(held);
        assert!(staging.reserve(1).await.is_some());
    }
}
