//! The memory that all request bodies under way may take together.
//!
//! A body counts by what has arrived of it beyond its first 64 KiB, until its
//! request has been read and its handler answers or begins to. One that would go
//! beyond the budget is refused; those that are there already are read on. Small
//! bodies are bounded by the number of connections, so that a few clients who
//! send large ones slowly keep nobody else out.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use futures_util::StreamExt;
use tokio::sync::Semaphore;

use crate::app::App;

/// What is left of the memory, in bytes; cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct BodyBudget {
    free: Arc<Semaphore>,
}

/// Of each body, not counted.
const FREE_BYTES: usize = 64 << 10;

/// One body's share; comes back when dropped.
struct Share {
    budget: BodyBudget,
    /// Not counted from here on.
    free_bytes: usize,
    bytes: usize,
}

/// The budget is spent.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("too many request bodies are under way")]
pub(crate) struct BudgetSpent;

impl BodyBudget {
    pub(crate) fn new(bytes: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(bytes)) }
    }
}

impl Share {
    fn grow(&mut self, part: &Bytes) -> Result<(), BudgetSpent> {
        let counted = part.len().saturating_sub(self.free_bytes);
        self.free_bytes = self.free_bytes.saturating_sub(part.len());
        let more = u32::try_from(counted).map_err(|_| BudgetSpent)?;
        self.budget.free.try_acquire_many(more).map_err(|_| BudgetSpent)?.forget();
        self.bytes += counted;
        Ok(())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.free.add_permits(self.bytes);
    }
}

/// Counts the body of every request that passes.
pub(super) async fn counted(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let share = Arc::new(std::sync::Mutex::new(Share {
        budget: app.bodies.clone(),
        free_bytes: FREE_BYTES,
        bytes: 0,
    }));
    let counting = share.clone();
    let request = request.map(|body| {
        let parts = body.into_data_stream().map(move |part| {
            let part = part?;
            crate::metrics::lock(&counting).grow(&part).map_err(axum::Error::new)?;
            Ok::<_, axum::Error>(part)
        });
        Body::from_stream(parts)
    });
    let response = next.run(request).await;
    drop(share);
    response
}
