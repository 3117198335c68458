//! How many encoded bytes the sender may have under way.
//!
//! ```text
//!  given = window + returned        arrived ≤ given, or the sender cheats
//!          returned + held = consumed ≤ arrived
//! ```

/// Credit goes back in batches of this share of the window: few messages, and
/// the sender never sees the window shrink by more than a quarter.
const BATCH_SHARE: u64 = 4;

/// The receiver's account.
#[derive(Debug)]
pub(super) struct Credit {
    window: u64,
    given: u64,
    arrived: u64,
    consumed: u64,
}

impl Credit {
    pub(super) fn new(window: u64) -> Self {
        Self { window, given: window, arrived: 0, consumed: 0 }
    }

    pub(super) fn window(&self) -> u64 {
        self.window
    }

    /// Takes note of a frame; false, and no change, if it exceeds the credit.
    pub(super) fn arrive(&mut self, bytes: u64) -> bool {
        match self.arrived.checked_add(bytes) {
            Some(arrived) if arrived <= self.given => {
                self.arrived = arrived;
                true
            }
            _ => false,
        }
    }

    /// Bytes arrived and neither stored nor dropped.
    pub(super) fn outstanding(&self) -> u64 {
        self.arrived - self.consumed
    }

    /// A frame that arrived was stored or dropped.
    pub(super) fn consume(&mut self, bytes: u64) {
        assert!(bytes <= self.outstanding(), "consumed more than arrived");
        self.consumed += bytes;
    }

    /// Credit to send now. `flush`: also a small amount, because the sender
    /// may be waiting for exactly that.
    pub(super) fn take(&mut self, flush: bool) -> Option<u64> {
        let held = self.consumed - (self.given - self.window);
        // A window near the top of u64 never needs more.
        let given = self.given.checked_add(held)?;
        let due = held > 0 && (flush || held >= self.window.div_ceil(BATCH_SHARE));
        due.then(|| {
            self.given = given;
            held
        })
    }

    pub(super) fn check_invariants(&self) {
        assert!(self.arrived <= self.given, "more bytes arrived than credit was given");
        assert!(self.consumed <= self.arrived, "more bytes consumed than arrived");
        assert!(self.given - self.window <= self.consumed, "credit returned for bytes not consumed");
        assert!(self.outstanding() <= self.window, "more bytes outstanding than the window");
    }
}
