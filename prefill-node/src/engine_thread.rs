//! The thread that owns the engine sessions. It takes a chunk, computes it,
//! exports it, hands the rows to the handoff task and goes on at once, so that
//! encoding and sending overlap with computing.
#![expect(clippy::disallowed_methods, reason = "shell: measures the engine's steps")]

use std::sync::Arc;
use std::time::Duration;

use engine::{BatchItem, EngineError, ExportedRows, Model, Session, SessionConfig};
use host::{Bug, ThreadEnd};
use kv_block::{Layout, SlotId};
use tokio::sync::oneshot;

use kv_transfer::membership::RecentMax;

use crate::board::Board;
use crate::scheduler::Chunk;
use crate::work_queue::{Computed, Work, WorkQueue};

/// A prefill session has one slot.
const SLOT: SlotId = SlotId(0);

/// A running engine thread.
pub(crate) struct EngineThread {
    pub(crate) layout: Arc<Layout>,
    /// Resolves when the thread has ended: `Ok` after [`WorkQueue::stop`].
    pub(crate) ended: ThreadEnd,
}

/// Makes the sessions on a thread of its own, pinned to `cpus` unless empty,
/// and serves `queue` with them.
pub(crate) async fn start(
    model: Arc<dyn Model>,
    sessions: SessionConfig,
    session_count: usize,
    cpus: Vec<usize>,
    queue: WorkQueue,
    board: Board,
) -> Result<EngineThread, StartError> {
    let (ready_sender, ready) = oneshot::channel();
    let body = async move {
        pin(&cpus);
        match open(&*model, &sessions, session_count) {
            Ok(mut sessions) => {
                let _ = ready_sender.send(Ok(sessions[0].layout().clone()));
                serve(&mut sessions, &queue, &board).await;
            }
            Err(error) => {
                let _ = ready_sender.send(Err(error));
            }
        }
    };
    let ended = host::thread("engine", body).map_err(|error| StartError::Thread(error.to_string()))?;
    match ready.await {
        Ok(layout) => Ok(EngineThread { layout: layout?, ended }),
        Err(_) => Err(StartError::Thread(match ended.await {
            Ok(Err(text)) => text,
            _ => "ended without a word".to_owned(),
        })),
    }
}

/// Why there is no engine thread.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("engine thread: {0}")]
    Thread(String),
}

fn open(
    model: &dyn Model,
    config: &SessionConfig,
    count: usize,
) -> Result<Vec<Box<dyn Session>>, EngineError> {
    (0..count).map(|_| model.prefill_session(config)).collect()
}

async fn serve(sessions: &mut [Box<dyn Session>], queue: &WorkQueue, board: &Board) {
    let mut slowest = RecentMax::default();
    while let Some(work) = queue.next(host::now).await {
        let session = &mut *sessions[work.chunk.resident];
        board.at_work(Some(host::now()));
        match run_chunk(session, &work, board, &mut slowest).await {
            Ok((rows, took)) => finish_chunk(&work, rows, took, queue),
            Err(error) => {
                session.clear(SLOT);
                queue.chunk_failed(&work.chunk);
                tracing::error!(%error, "engine could not compute a chunk");
                work.tell(Computed::Failed(error.to_string()));
            }
        }
        board.at_work(None);
    }
}

fn finish_chunk(work: &Work, rows: Option<ExportedRows>, took: Duration, queue: &WorkQueue) {
    queue.chunk_done(&work.chunk, took);
    work.tell(Computed::Chunk { tokens: work.chunk.range.end, rows });
    if work.chunk.last {
        work.tell(Computed::Finished);
    }
}

/// Computes and exports; returns the rows, if any, and the time that computing took.
async fn run_chunk(
    session: &mut dyn Session,
    work: &Work,
    board: &Board,
    slowest: &mut RecentMax,
) -> Result<(Option<ExportedRows>, Duration), EngineError> {
    let chunk = &work.chunk;
    prepare(session, chunk)?;
    if chunk.first {
        work.tell(Computed::Started { reused: chunk.reused });
    }
    let begin = host::now();
    if chunk.compute {
        let tokens = &chunk.tokens[chunk.range.clone()];
        session.step(&[BatchItem { slot: SLOT, tokens, logits: false }])?;
        host::stepped().await;
        let now = host::now();
        let micros = now.duration_since(begin).as_micros() as u64;
        board.stepped(tokens.len(), slowest.record(now, micros));
    }
    let took = host::now().saturating_duration_since(begin);
    let rows = match chunk.export.is_empty() {
        true => None,
        false => Some(session.export(SLOT, chunk.export.clone())?),
    };
    Ok((rows, took))
}

/// Leaves exactly the tokens in the session that the chunk builds on.
fn prepare(session: &mut dyn Session, chunk: &Chunk) -> Result<(), EngineError> {
    let resident = session.resident(SLOT);
    if host::has(Bug::SessionNotCut) {
        return Ok(());
    }
    if resident < chunk.held {
        return Err(EngineError::Range { slot: SLOT.0, resident, start: 0, end: chunk.held });
    }
    if chunk.held == 0 {
        session.clear(SLOT);
    } else if resident > chunk.held {
        session.truncate(SLOT, chunk.held)?;
    }
    Ok(())
}

fn pin(cpus: &[usize]) {
    if cpus.is_empty() {
        return;
    }
    let mut set = rustix::thread::CpuSet::new();
    cpus.iter().for_each(|&cpu| set.set(cpu));
    // The engine's own compute threads are started from here and inherit it.
    if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
        tracing::warn!(%error, ?cpus, "engine thread not pinned");
    }
}
