//! Named mixes of faults, and what may go wrong under each.

use std::time::Duration;

use crate::mesh::Sizes;
use crate::network::Weather;
use crate::workload::Shape;

/// What happens to a run's mesh and clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum Mix {
    /// Nothing.
    Calm,
    /// The network delays, loses and reorders packets.
    Weather,
    /// Clients leave early or stop reading.
    Clients,
    /// Links between machines are cut and mended, one way or both.
    Links,
    /// Nodes die without a word and come back.
    Kills,
    /// Nodes are told to stop, drain and come back.
    Stops,
    /// Whole nodes stand still for a while.
    Freezes,
    /// Engines fail in single calls, or stand still while their node answers.
    Engines,
    /// The router dies and comes back.
    Router,
    /// Memory and queues are smaller than what is asked of them.
    Scarce,
    /// Ten times as many requests come as the mesh can serve.
    Overload,
    /// All but overload.
    Everything,
}

/// One kind of disturbance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// New weather.
    Weather,
    /// A link stops carrying, in one direction or both.
    Cut,
    /// A node dies.
    Kill,
    /// A node is told to stop.
    Stop,
    /// A node stands still.
    Freeze,
    /// Only its engine does.
    FreezeEngine,
    /// The engine's next calls fail.
    EngineError,
    /// The router dies.
    KillRouter,
}

/// What may become of a request that could be served, besides the right answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Allowed {
    /// 503 with `Retry-After`, before any of the answer.
    pub(crate) refusals: bool,
    /// Any status from 500, or an error in the stream.
    pub(crate) errors: bool,
    /// An end without a word.
    pub(crate) router_lost: bool,
}

impl Allowed {
    /// Nothing but the right answer.
    pub(crate) const NOTHING: Self = Self { refusals: false, errors: false, router_lost: false };
}

impl Mix {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::Calm,
        Self::Weather,
        Self::Clients,
        Self::Links,
        Self::Kills,
        Self::Stops,
        Self::Freezes,
        Self::Engines,
        Self::Router,
        Self::Scarce,
        Self::Overload,
        Self::Everything,
    ];

    /// Kinds of faults, each as likely as the others.
    pub fn faults(self) -> &'static [Fault] {
        match self {
            Self::Calm | Self::Clients | Self::Scarce | Self::Overload => &[],
            Self::Weather => &[Fault::Weather],
            Self::Links => &[Fault::Cut],
            Self::Kills => &[Fault::Kill],
            Self::Stops => &[Fault::Stop],
            Self::Freezes => &[Fault::Freeze],
            Self::Engines => &[Fault::FreezeEngine, Fault::EngineError],
            Self::Router => &[Fault::KillRouter],
            Self::Everything => &[
                Fault::Weather,
                Fault::Cut,
                Fault::Kill,
                Fault::Stop,
                Fault::Freeze,
                Fault::FreezeEngine,
                Fault::EngineError,
                Fault::KillRouter,
            ],
        }
    }

    /// Faults that may be at work at once.
    pub fn faults_at_once(self) -> usize {
        match self {
            _ if self.faults().is_empty() => 0,
            Self::Everything => 3,
            _ => 1,
        }
    }

    /// What may become of a request that could be served. What is answered must
    /// be right in any case.
    pub(crate) fn allowed(self) -> Allowed {
        Allowed {
            refusals: !matches!(self, Self::Calm | Self::Weather | Self::Clients),
            errors: !matches!(
                self,
                Self::Calm | Self::Weather | Self::Clients | Self::Scarce | Self::Overload
            ),
            router_lost: self.faults().contains(&Fault::KillRouter),
        }
    }

    /// Memory and queues.
    pub(crate) fn sizes(self) -> Sizes {
        match self {
            Self::Scarce | Self::Everything => Sizes::SCARCE,
            Self::Overload => Sizes { queue_requests: 24, queue_tokens: 20_000, ..Sizes::AMPLE },
            _ => Sizes::AMPLE,
        }
    }

    /// Clients that wait for an answer at once; more come later.
    pub(crate) fn clients_max(self) -> usize {
        if self == Self::Overload { 400 } else { 32 }
    }

    /// The clients.
    pub(crate) fn shape(self) -> Shape {
        let calm =
            Shape { leave: 0.0, stall: 0.0, invalid: 0.05, retry: 0.0, pause: Duration::from_millis(60) };
        match self {
            Self::Clients | Self::Everything => Shape { leave: 0.2, stall: 0.1, retry: 0.3, ..calm },
            Self::Scarce => Shape { retry: 0.5, ..calm },
            Self::Overload => Shape { pause: calm.pause / 15, ..calm },
            _ => calm,
        }
    }
}

/// Weathers to draw from; the first is fair.
pub(crate) const WEATHERS: [Weather; 4] = [
    Weather::FAIR,
    Weather {
        delay: Duration::from_millis(10),
        jitter: Duration::ZERO,
        loss: 0.01,
        per_packet: Duration::from_micros(100),
    },
    Weather {
        delay: Duration::from_millis(1),
        jitter: Duration::from_millis(20),
        loss: 0.05,
        per_packet: Duration::from_micros(20),
    },
    Weather {
        delay: Duration::from_millis(40),
        jitter: Duration::from_millis(40),
        loss: 0.1,
        per_packet: Duration::from_millis(1),
    },
];
