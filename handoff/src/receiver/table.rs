//! The receiver's legal transitions, all of them.
//!
//! An event becomes a [`Trigger`] once its facts are judged; state and trigger
//! alone decide what follows. What a peer does out of order ends the handoff;
//! what the shell does out of order is a bug.

use super::types::ReceiverState;

/// An event with its facts judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trigger {
    /// The sender took the request.
    Accepted,
    /// The sender said no.
    Refused,
    /// A sign of life.
    Progress,
    /// A good frame header arrived.
    FrameAdmitted,
    /// Rows are in place; more is to come.
    FrameStored,
    /// Rows are in place, the last ones, and the manifest was here before.
    LastFrameStored,
    /// Rows do not match their checksum or cannot be decoded.
    FrameDamaged,
    /// The shell reports a frame that was never admitted, or reports it twice.
    FrameUnknown,
    /// The manifest agrees; frames are missing.
    ManifestFirst,
    /// The manifest agrees and everything is here.
    ManifestLast,
    /// The manifest disagrees.
    ManifestWrong,
    /// A second manifest.
    ManifestAgain,
    /// A frame header breaks the protocol.
    Violation(&'static str),
    /// The engine installed the blob.
    InstallDone,
    /// The engine refused the blob.
    InstallFailed,
    /// This side gives up.
    CancelRequested,
    /// The sender gave up.
    CancelReceived,
    /// Stream or connection are gone.
    PeerLost,
    /// No progress for too long.
    Stalled,
    /// The shell woke up too early, or progress came in between.
    WokeEarly,
}

/// What follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Take the event in and be in this state.
    To(ReceiverState),
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
    /// The sequence runs; the sender is told.
    Installed,
    /// The sender said no first thing.
    Refused,
    /// This side gave up; the sender is told.
    Cancelled,
    /// The engine refused; the sender is told.
    InstallFailed,
    /// The sender is gone or gave up: nobody to tell.
    Lost(&'static str),
    /// The sender misbehaved or fell silent; it is told.
    Dropped(&'static str),
}

/// The table: trigger, from → to.
pub(super) fn step(state: ReceiverState, trigger: Trigger) -> Step {
    use Ending::{Cancelled, Dropped, InstallFailed, Installed, Lost, Refused};
    use ReceiverState::{Ended, Installing, Receiving, Requested};
    use Step::{Bug, End, Ignore, To};
    use Trigger as T;

    #[rustfmt::skip]
    let step = match (trigger, state) {
        (_, Ended) => Ignore,
        (T::WokeEarly, _) => Ignore,
        (T::FrameUnknown, _) => Bug,

        (T::CancelRequested, _) => End(Cancelled),

        (T::Accepted, Requested) => To(Receiving),
        (T::Accepted, Receiving) => To(Receiving), // frames overtook it

        (T::Refused, Requested) => End(Refused),
        (T::Refused, Receiving) => End(Lost("refused after accepting")),

        (T::Progress, Requested) => End(Dropped("progress before acceptance")),
        (T::Progress, Receiving) => To(Receiving),

        (T::FrameAdmitted, Requested) => To(Receiving), // overtook Accepted
        (T::FrameAdmitted, Receiving) => To(Receiving),
        (T::FrameStored, Receiving) => To(Receiving),
        (T::LastFrameStored, Receiving) => To(Installing),
        (T::FrameDamaged, Receiving) => End(Dropped("frame is damaged")),
        (T::Violation(what), Requested | Receiving) => End(Dropped(what)),

        (T::ManifestFirst | T::ManifestLast, Requested) => End(Dropped("manifest before acceptance")),
        (T::ManifestFirst, Receiving) => To(Receiving),
        (T::ManifestLast, Receiving) => To(Installing),
        (T::ManifestWrong, Requested | Receiving) => End(Dropped("manifest does not agree")),
        (T::ManifestAgain, Requested | Receiving) => End(Dropped("second manifest")),

        (T::CancelReceived, Requested | Receiving) => End(Lost("cancelled by prefill node")),
        (T::PeerLost, Requested | Receiving) => End(Lost("connection lost")),
        (T::Stalled, Requested) => End(Dropped("no answer")),
        (T::Stalled, Receiving) => End(Dropped("stalled")),

        // Everything is here and verified: nothing that the sender does matters.
        (T::PeerLost | T::CancelReceived | T::Refused, Installing) => To(Installing),
        (T::Accepted | T::Progress | T::Violation(_) | T::Stalled, Installing) => Ignore,
        (T::ManifestFirst | T::ManifestLast | T::ManifestWrong | T::ManifestAgain, Installing) => Ignore,
        (T::InstallDone, Installing) => End(Installed),
        (T::InstallFailed, Installing) => End(InstallFailed),

        (T::InstallDone | T::InstallFailed, Requested | Receiving) => Bug,
        (T::FrameStored | T::LastFrameStored | T::FrameDamaged, Requested | Installing) => Bug,
        (T::FrameAdmitted, Installing) => Bug,
    };
    step
}
