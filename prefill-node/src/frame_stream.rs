//! Writes one handoff's frames, one QUIC stream per chunk, in a task of its
//! own: the network's flow control holds up this task and nothing else.
//! Dropping a [`FrameStream`] resets what is not finished.
#![expect(clippy::disallowed_methods, reason = "shell: starts the writer task")]

use kv_transfer::{Connection, FrameWriter, TransferError};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::encode::EncodedBlock;

/// A block that the network took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Written {
    pub(crate) index: usize,
    pub(crate) bytes: u64,
    pub(crate) ends_chunk: bool,
}

/// Handle of the writer task.
pub(crate) struct FrameStream {
    /// Unbounded as a channel; the receiver's credit bounds what is in it.
    blocks: mpsc::UnboundedSender<EncodedBlock>,
    written: mpsc::UnboundedReceiver<Result<Written, TransferError>>,
    task: JoinHandle<()>,
}

impl FrameStream {
    pub(crate) fn new(connection: Connection) -> Self {
        let (blocks, block_queue) = mpsc::unbounded_channel();
        let (written_queue, written) = mpsc::unbounded_channel();
        let task = host::spawn(async move {
            if let Err(error) = write_blocks(&connection, block_queue, &written_queue).await {
                let _ = written_queue.send(Err(error));
            }
        });
        Self { blocks, written, task }
    }

    /// Sends a block after those before it.
    pub(crate) fn send(&self, block: EncodedBlock) {
        // A writer that has ended has said why through `written`.
        let _ = self.blocks.send(block);
    }

    /// Next block written. Pending for ever once the writer has ended and said why.
    pub(crate) async fn written(&mut self) -> Result<Written, TransferError> {
        match self.written.recv().await {
            Some(result) => result,
            None => std::future::pending().await,
        }
    }
}

impl Drop for FrameStream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn write_blocks(
    connection: &Connection,
    mut blocks: mpsc::UnboundedReceiver<EncodedBlock>,
    written: &mpsc::UnboundedSender<Result<Written, TransferError>>,
) -> Result<(), TransferError> {
    let mut stream: Option<FrameWriter> = None;
    while let Some(block) = blocks.recv().await {
        let writer = match &mut stream {
            Some(writer) => writer,
            None => stream.insert(connection.open_frames().await?),
        };
        let report = Written { index: block.index, bytes: block.bytes, ends_chunk: block.ends_chunk };
        for (header, payload) in block.frames {
            writer.send(&header, payload).await?;
        }
        if report.ends_chunk
            && let Some(writer) = stream.take()
        {
            writer.finish();
        }
        let _ = written.send(Ok(report));
    }
    Ok(())
}
