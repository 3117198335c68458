//! The nodes of the mesh, as they told. Pure.
//!
//! ```text
//!  Hello ──check──▶ registered ◀── Status, Warm, Draining
//!                       │ connection closed, or registered again
//!                       ▼
//!                      gone
//! ```
//!
//! A node is *healthy* while its status is fresh and its engine moves. Only
//! healthy nodes that do not drain are offered to the policy. What the router
//! itself has just given to a node counts at once ([`NodeLoad`]): a status is up
//! to 250 ms old, and simultaneous decisions must not all see an idle node.

mod load;
mod node;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kv_block::{BlockTable, ChainSeed, Fingerprint, IsolationKey, LayoutId, Token};
use kv_transfer::{Hello, PROTOCOL_VERSION, PrefillCandidate, Role, Status};

pub(crate) use load::{NodeLoad, Reservation};
pub(crate) use node::Node;

use crate::policy::{DecodeView, PrefillView};

/// All registered nodes. `L` is the shell's handle of a node's connection.
#[derive(Debug)]
pub(crate) struct Registry<L> {
    fingerprint: Fingerprint,
    nodes: BTreeMap<String, Node<L>>,
    registrations: u64,
    frozen_after: Duration,
    /// When a decode node last told anything.
    decode_heard: Option<Instant>,
}

/// Which life of a node a message belongs to: one of an old connection must
/// not change the node that replaced it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Registration {
    name: String,
    number: u64,
}

impl Registration {
    /// The node's name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

/// The peer as its certificate names it, and where it connects from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer<'a> {
    pub(crate) name: &'a str,
    pub(crate) role: Role,
    pub(crate) address: std::net::SocketAddr,
}

/// A node that has just come or come back gets its full share after so long.
pub(crate) const WARM_UP: Duration = Duration::from_secs(10);

/// Status comes at least every 250 ms.
pub(crate) const STALE_AFTER: Duration = Duration::from_secs(3);

impl<L: Clone> Registry<L> {
    /// An engine that has work and stands still for `frozen_after` is frozen.
    pub(crate) fn new(fingerprint: Fingerprint, frozen_after: Duration) -> Self {
        Self { fingerprint, nodes: BTreeMap::new(), registrations: 0, frozen_after, decode_heard: None }
    }

    /// Registers a node, or says why not, naming both values. A node of that
    /// name that was there before is replaced; its connection is returned.
    pub(crate) fn register(
        &mut self,
        now: Instant,
        peer: Peer<'_>,
        hello: Hello,
        link: L,
    ) -> Result<(Registration, Option<L>), String> {
        let role = self.check(peer, &hello)?;
        if role == Role::Decode {
            self.decode_heard = Some(now);
        }
        self.registrations += 1;
        let registration = Registration { name: hello.name.clone(), number: self.registrations };
        let node = Node::new(registration.number, now, role, reachable(hello, peer), link, self.frozen_after);
        let replaced = self.nodes.insert(registration.name.clone(), node);
        Ok((registration, replaced.map(|node| node.link)))
    }

    fn check(&self, peer: Peer<'_>, hello: &Hello) -> Result<Role, String> {
        let mismatch = |what: &str, theirs: &dyn std::fmt::Display, ours: &dyn std::fmt::Display| {
            Err(format!("{what} of the node is {theirs}, of the router {ours}"))
        };
        if hello.protocol != PROTOCOL_VERSION {
            return mismatch("protocol version", &hello.protocol, &PROTOCOL_VERSION);
        }
        if hello.name != peer.name {
            return Err(format!("the node calls itself {:?}, its certificate {:?}", hello.name, peer.name));
        }
        if peer.role == Role::Router || hello.role != peer.role.as_str() {
            return Err(format!("the node's role is {:?}, its certificate's {}", hello.role, peer.role));
        }
        let fingerprint = Fingerprint(hello.fingerprint);
        if fingerprint != self.fingerprint {
            return mismatch("model fingerprint", &fingerprint, &self.fingerprint);
        }
        for (what, value, most) in [
            ("block_tokens", hello.block_tokens, FIGURE_MAX),
            ("context_tokens", hello.context_tokens, FIGURE_MAX),
            ("slots", hello.slots, SLOTS_MAX),
        ] {
            if value == 0 || value > most {
                return Err(format!("{what} is {value}, allowed 1 to {most}"));
            }
        }
        self.check_pairing(peer.role, hello)?;
        Ok(peer.role)
    }

    /// A prefill node that fits none of the decode nodes is refused: it would
    /// wait for work that never comes. A decode node is taken in, since it can
    /// serve alone, and the prefill nodes that it cannot use are named.
    fn check_pairing(&self, role: Role, hello: &Hello) -> Result<(), String> {
        let others = self.nodes.values().filter(|node| node.role != role);
        let mut misfits = others.map(|node| node.misfit(hello));
        if role == Role::Prefill {
            return match misfits.next() {
                Some(Some(reason)) if misfits.all(|misfit| misfit.is_some()) => Err(reason),
                _ => Ok(()),
            };
        }
        for reason in misfits.flatten() {
            tracing::warn!(node = hello.name, reason, "prefill node cannot serve this decode node");
        }
        Ok(())
    }

    /// Takes a status; an older one than the last is dropped.
    pub(crate) fn status(&mut self, now: Instant, registration: &Registration, status: Status) {
        if let Some(node) = self.current(registration) {
            node.take_status(now, status);
            if node.role == Role::Decode {
                self.decode_heard = Some(now);
            }
        }
    }

    /// Takes news of a slot.
    pub(crate) fn warm(&mut self, registration: &Registration, slot: u16, hashes: &[[u8; 32]]) {
        if let Some(node) = self.current(registration) {
            node.prefix.set(usize::from(slot), hashes);
        }
    }

    /// The node takes no new requests.
    pub(crate) fn draining(&mut self, registration: &Registration) {
        if let Some(node) = self.current(registration) {
            node.draining = true;
        }
    }

    /// The node's connection is gone, and with it all it told. Returns whether
    /// it had said before that it would go.
    pub(crate) fn disconnected(&mut self, registration: &Registration) -> bool {
        if self.current(registration).is_none() {
            return false;
        }
        self.nodes.remove(&registration.name).is_some_and(|node| node.draining)
    }

    /// All nodes, by name.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = &Node<L>> {
        self.nodes.values()
    }

    /// The node of that name.
    pub(crate) fn node(&self, name: &str) -> Option<&Node<L>> {
        self.nodes.get(name)
    }

    /// Healthy decode nodes that take requests, as the policy sees them.
    /// Those named in `without` are left out.
    pub(crate) fn decode_views(
        &self,
        now: Instant,
        tokens: &[Token],
        isolation: IsolationKey,
        without: &[Registration],
    ) -> Vec<DecodeView> {
        let mut tables = Tables { fingerprint: self.fingerprint, isolation, tokens, made: Vec::new() };
        let ready = || self.ready_without(now, without);
        let busiest = ready().map(Node::requests_in_flight).max().unwrap_or(0);
        ready()
            .map(|node| {
                let cached = node.prefix.cached_tokens(tables.of(node.layout(), node.block_tokens()));
                let view = node.decode_view(cached, self.prefill_for(now, node));
                // A node that has just come or come back looks busy at first, so
                // that it is not flooded while its caches are cold. Never full:
                // it may be the only one with a free slot.
                let pretended = node.newness(now) * busiest as f64;
                let most = view.slots.saturating_sub(1).max(view.requests_in_flight);
                let requests_in_flight = (view.requests_in_flight + pretended.ceil() as usize).min(most);
                DecodeView { requests_in_flight, ..view }
            })
            .collect()
    }

    /// Whether a decode node that is not among those named in `without` is ready
    /// and has a free slot.
    pub(crate) fn has_free_decode_node(&self, now: Instant, without: &[Registration]) -> bool {
        self.ready_without(now, without).any(|node| node.requests_in_flight() < node.hello.slots as usize)
    }

    /// Whether there was a decode node within `lately`.
    pub(crate) fn had_decode_node(&self, now: Instant, lately: Duration) -> bool {
        self.decode_heard.is_some_and(|heard| now.saturating_duration_since(heard) < lately)
    }

    /// Longest context of the ready decode nodes.
    pub(crate) fn context_tokens(&self, now: Instant) -> Option<usize> {
        self.ready(now, Role::Decode).map(|node| node.hello.context_tokens as usize).max()
    }

    /// The nodes of these names with their addresses, as a decode node gets them.
    pub(crate) fn candidates(&self, names: &[String]) -> Vec<PrefillCandidate> {
        let nodes = names.iter().filter_map(|name| self.nodes.get(name));
        nodes
            .map(|node| PrefillCandidate {
                name: node.hello.name.clone(),
                address: node.hello.address.clone(),
            })
            .collect()
    }

    fn prefill_for(&self, now: Instant, decode: &Node<L>) -> Vec<PrefillView> {
        self.ready(now, Role::Prefill)
            .filter(|prefill| prefill.serves(decode))
            .map(Node::prefill_view)
            .collect()
    }

    fn ready(&self, now: Instant, role: Role) -> impl Iterator<Item = &Node<L>> {
        self.nodes.values().filter(move |node| node.role == role && !node.draining && node.healthy(now))
    }

    /// Ready decode nodes but these.
    fn ready_without(&self, now: Instant, without: &[Registration]) -> impl Iterator<Item = &Node<L>> {
        self.ready(now, Role::Decode).filter(|node| !without.iter().any(|one| node.is(one)))
    }

    fn current(&mut self, registration: &Registration) -> Option<&mut Node<L>> {
        self.nodes.get_mut(&registration.name).filter(|node| node.is(registration))
    }
}

/// Far above any node's block length, context or slots; bounds what a node's
/// words can make the router allocate.
const FIGURE_MAX: u32 = 1 << 24;
/// As many as a decode node can be configured to have, several times; each may
/// have a chain of block hashes here.
const SLOTS_MAX: u32 = 1 << 10;

/// A node that listens on all addresses is reached where it came from.
fn reachable(mut hello: Hello, peer: Peer<'_>) -> Hello {
    if let Ok(mut address) = hello.address.parse::<std::net::SocketAddr>()
        && address.ip().is_unspecified()
    {
        address.set_ip(peer.address.ip());
        hello.address = address.to_string();
    }
    hello
}

/// Block tables of one prompt: one per layout and block length in the mesh,
/// usually one in all.
struct Tables<'a> {
    fingerprint: Fingerprint,
    isolation: IsolationKey,
    tokens: &'a [Token],
    made: Vec<(LayoutId, BlockTable)>,
}

impl Tables<'_> {
    fn of(&mut self, layout: LayoutId, block_tokens: usize) -> &BlockTable {
        let known = self
            .made
            .iter()
            .position(|(known, table)| *known == layout && table.block_tokens() == block_tokens);
        let index = known.unwrap_or_else(|| {
            let seed = ChainSeed::new(self.fingerprint, layout, self.isolation);
            self.made.push((layout, BlockTable::new(seed, self.tokens, block_tokens)));
            self.made.len() - 1
        });
        &self.made[index].1
    }
}

#[cfg(test)]
mod tests;
