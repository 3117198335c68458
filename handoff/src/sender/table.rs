//! The sender's legal transitions, all of them.
//!
//! An event becomes a [`Trigger`] once its facts are judged; state and trigger
//! alone decide what follows. What a peer does out of order ends the handoff;
//! what the shell does out of order is a bug.

use super::types::SenderState;

/// An event with its facts judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trigger {
    /// The engine took the prompt up.
    ComputeStarted,
    /// The next block is ready.
    BlockEncoded,
    /// A block out of order, or one not wanted.
    BlockUnexpected,
    /// Everything is computed; blocks wait or are under way.
    FinishedUnsent,
    /// Everything is computed and sent.
    FinishedSent,
    /// The shell calls it finished while blocks are missing.
    FinishedShort,
    /// The engine could not compute the prompt.
    ComputeFailed,
    /// A block is sent; others wait or are under way.
    BlockSent,
    /// A block is sent and none is left.
    LastBlockSent,
    /// The shell reports a block that is not under way.
    BlockUnknown,
    /// More bytes may be sent.
    Credit,
    /// The receiver runs the sequence.
    Installed,
    /// The receiver gave up.
    CancelReceived,
    /// This side gives up.
    CancelRequested,
    /// Stream or connection are gone.
    PeerLost,
    /// The receiver has been silent for too long.
    Stalled,
    /// The shell woke up too early, or a word came in between.
    WokeEarly,
}

/// What follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Take the event in and be in this state.
    To(SenderState),
    /// Free everything and end like this.
    End(Ending),
    /// Nothing: the event comes too late to matter.
    Ignore,
    /// The shell must not do this here.
    Bug,
}

/// Ways to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// The receiver runs the sequence.
    Installed,
    /// The receiver gave up: nobody to tell.
    CancelledByPeer,
    /// This side gave up; the receiver is told.
    Cancelled(&'static str),
    /// The receiver is gone: nobody to tell.
    PeerLost,
    /// The receiver fell silent; it is told.
    Stalled,
    /// The engine failed; the receiver is told.
    ComputeFailed,
}

/// The table: trigger, from → to.
pub(super) fn step(state: SenderState, trigger: Trigger) -> Step {
    use SenderState::{AwaitingInstall, Computing, Draining, Ended, Queued};
    use Step::{Bug, End, Ignore, To};
    use Trigger as T;

    #[rustfmt::skip]
    let step = match (trigger, state) {
        (_, Ended) => Ignore,
        (T::WokeEarly, _) => Ignore,
        (T::BlockUnexpected | T::BlockUnknown | T::FinishedShort, _) => Bug,

        (T::CancelReceived, _) => End(Ending::CancelledByPeer),
        (T::CancelRequested, _) => End(Ending::Cancelled("cancelled by prefill node")),
        (T::PeerLost, _) => End(Ending::PeerLost),
        (T::Stalled, _) => End(Ending::Stalled),
        (T::Credit, state) => To(state),

        (T::ComputeStarted, Queued) => To(Computing),
        (T::BlockEncoded, Computing) => To(Computing),
        (T::FinishedUnsent, Computing) => To(Draining),
        (T::FinishedSent, Computing) => To(AwaitingInstall),
        (T::ComputeFailed, Queued | Computing) => End(Ending::ComputeFailed),

        (T::BlockSent, Computing) => To(Computing),
        (T::LastBlockSent, Computing) => To(Computing), // of those encoded so far
        (T::BlockSent, Draining) => To(Draining),
        (T::LastBlockSent, Draining) => To(AwaitingInstall),

        (T::Installed, AwaitingInstall) => End(Ending::Installed),
        (T::Installed, Queued | Computing | Draining) => End(Ending::Cancelled("installed before the manifest")),

        (T::ComputeStarted, Computing | Draining | AwaitingInstall) => Bug,
        (T::BlockEncoded | T::FinishedUnsent | T::FinishedSent, Queued | Draining | AwaitingInstall) => Bug,
        (T::ComputeFailed, Draining | AwaitingInstall) => Bug,
        (T::BlockSent | T::LastBlockSent, Queued | AwaitingInstall) => Bug,
    };
    step
}
