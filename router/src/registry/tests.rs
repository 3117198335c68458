use kv_block::Token;

use super::*;

const FINGERPRINT: Fingerprint = Fingerprint([7; 32]);

fn hello(name: &str, role: &str) -> Hello {
    Hello {
        protocol: PROTOCOL_VERSION,
        name: name.into(),
        role: role.into(),
        address: "10.0.0.9:7001".into(),
        pid: 1,
        model: "tiny".into(),
        fingerprint: FINGERPRINT.0,
        layout: [3; 32],
        block_tokens: 4,
        context_tokens: 64,
        slots: 2,
        blocks_unsupported: String::new(),
    }
}

fn peer<'a>(hello: &'a Hello) -> Peer<'a> {
    let role = if hello.role == "prefill" { Role::Prefill } else { Role::Decode };
    Peer { name: &hello.name, role, address: "10.0.0.5:999".parse().unwrap() }
}

struct Mesh {
    registry: Registry<u32>,
    now: Instant,
}

impl Mesh {
    #[expect(clippy::disallowed_methods, reason = "an arbitrary start of virtual time")]
    fn new() -> Self {
        Self { registry: Registry::new(FINGERPRINT, Duration::from_secs(15)), now: Instant::now() }
    }

    fn join(&mut self, hello: Hello) -> Registration {
        let peer_of = hello.clone();
        self.registry.register(self.now, peer(&peer_of), hello, 0).unwrap().0
    }

    fn refuse(&mut self, hello: Hello) -> String {
        let peer_of = hello.clone();
        self.registry.register(self.now, peer(&peer_of), hello, 0).unwrap_err()
    }

    fn views(&self) -> Vec<DecodeView> {
        let tokens: Vec<_> = (0..9).map(Token).collect();
        self.registry.decode_views(self.now, &tokens, IsolationKey::SHARED, &[])
    }
}

#[test]
fn a_mismatch_is_refused_and_both_values_are_named() {
    let mut mesh = Mesh::new();
    let other = Hello { fingerprint: [8; 32], ..hello("d", "decode") };
    let reason = mesh.refuse(other);
    assert!(reason.contains("0808080808080808") && reason.contains("0707070707070707"), "{reason}");
    let reason = mesh.refuse(Hello { protocol: 99, ..hello("d", "decode") });
    assert!(reason.contains("99") && reason.contains(&PROTOCOL_VERSION.to_string()), "{reason}");
    let reason = mesh.refuse(Hello { block_tokens: 0, ..hello("d", "decode") });
    assert_eq!(reason, "block_tokens is 0, allowed 1 to 16777216");
    let reason = mesh.refuse(Hello { slots: 2000, ..hello("d", "decode") });
    assert_eq!(reason, "slots is 2000, allowed 1 to 1024");
}

#[test]
fn name_and_role_must_be_those_of_the_certificate() {
    let mut mesh = Mesh::new();
    let certified = hello("d", "decode");
    for claimed in [hello("other", "decode"), hello("d", "prefill")] {
        let result = mesh.registry.register(mesh.now, peer(&certified), claimed, 0);
        assert!(result.unwrap_err().contains("certificate"));
    }
}

#[test]
fn a_prefill_node_of_another_layout_is_not_offered() {
    let mut mesh = Mesh::new();
    // Those that come before the decode node are not refused.
    mesh.join(Hello { layout: [4; 32], ..hello("p0", "prefill") });
    mesh.join(Hello { block_tokens: 8, ..hello("p1", "prefill") });
    mesh.join(hello("p2", "prefill"));
    mesh.join(hello("d", "decode"));
    let names: Vec<_> = mesh.views()[0].prefill.iter().map(|prefill| prefill.name.clone()).collect();
    assert_eq!(names, ["p2"]);
}

#[test]
fn a_stale_node_is_not_chosen_and_comes_back() {
    let mut mesh = Mesh::new();
    let registration = mesh.join(hello("d", "decode"));
    mesh.now += STALE_AFTER + Duration::from_millis(1);
    assert!(mesh.views().is_empty());
    mesh.registry.status(mesh.now, &registration, Status::default());
    assert_eq!(mesh.views().len(), 1);
}

#[test]
fn a_silent_node_has_a_better_one_only_while_another_speaks() {
    let mut mesh = Mesh::new();
    let one = mesh.join(hello("one", "decode"));
    let other = mesh.join(hello("two", "decode"));
    let one = [one];
    mesh.now += STALE_AFTER + Duration::from_millis(1);
    assert!(mesh.registry.node("one").unwrap().silent(mesh.now));
    assert!(!mesh.registry.has_free_decode_node(mesh.now, &one), "the router itself may have stood still");
    mesh.registry.status(mesh.now, &other, Status { sequence: 1, ..Status::default() });
    assert!(mesh.registry.has_free_decode_node(mesh.now, &one));
    assert!(!mesh.registry.has_free_decode_node(mesh.now, &[one[0].clone(), other.clone()]));
    let busy = Status { sequence: 2, requests_in_flight: 2, ..Status::default() };
    mesh.registry.status(mesh.now, &other, busy);
    assert!(!mesh.registry.has_free_decode_node(mesh.now, &one), "both of its slots are taken");
}

#[test]
fn a_node_that_registered_again_is_another_one() {
    let mut mesh = Mesh::new();
    let first = mesh.join(hello("d", "decode"));
    let left_out = [first];
    let views = |mesh: &Mesh| {
        mesh.registry.decode_views(mesh.now, &[Token(1)], IsolationKey::SHARED, &left_out).len()
    };
    assert_eq!(views(&mesh), 0);
    mesh.join(hello("d", "decode"));
    assert_eq!(views(&mesh), 1);
    let minute = Duration::from_secs(60);
    assert!(mesh.registry.had_decode_node(mesh.now + minute / 2, minute));
    assert!(!mesh.registry.had_decode_node(mesh.now + minute, minute));
    assert!(!Mesh::new().registry.had_decode_node(mesh.now, minute));
}

#[test]
fn a_node_that_comes_back_gets_its_share_by_and_by() {
    let mut mesh = Mesh::new();
    let old = mesh.join(Hello { slots: 20, ..hello("old", "decode") });
    let reservations: Vec<_> =
        (0..10).map(|_| Reservation::new(&mesh.registry.node("old").unwrap().load, 0)).collect();
    for _ in 0..WARM_UP.as_secs() {
        mesh.now += Duration::from_secs(1);
        mesh.registry.status(mesh.now, &old, Status::default());
    }
    mesh.join(Hello { slots: 20, ..hello("new", "decode") });
    let mut looks_like = |after: Duration| {
        let now = mesh.now + after;
        mesh.registry.status(now, &old, Status::default());
        let tokens: Vec<_> = (0..9).map(Token).collect();
        let views = mesh.registry.decode_views(mesh.now + after, &tokens, IsolationKey::SHARED, &[]);
        views.iter().map(|view| (view.name.clone(), view.requests_in_flight)).collect::<Vec<_>>()
    };
    assert_eq!(looks_like(Duration::ZERO), [("new".into(), 10), ("old".into(), 10)]);
    assert_eq!(looks_like(Duration::from_millis(2500)), [("new".into(), 8), ("old".into(), 10)]);
    drop(reservations);
    assert_eq!(looks_like(Duration::from_millis(2500)), [("new".into(), 0), ("old".into(), 0)]);
}

#[test]
fn a_new_node_with_free_slots_is_never_taken_for_full() {
    let mut mesh = Mesh::new();
    mesh.join(hello("old", "decode"));
    let _running: Vec<_> =
        (0..2).map(|_| Reservation::new(&mesh.registry.node("old").unwrap().load, 0)).collect();
    mesh.join(hello("new", "decode"));
    let views = mesh.views();
    let loads: Vec<_> = views.iter().map(|view| (view.requests_in_flight, view.slots)).collect();
    assert_eq!(loads, [(1, 2), (2, 2)], "both have just come");
}

#[test]
fn a_frozen_engine_is_not_chosen_however_fresh_its_status() {
    let mut mesh = Mesh::new();
    let registration = mesh.join(hello("d", "decode"));
    let busy = |sequence, steps_total| Status {
        sequence,
        steps_total,
        queue_tokens: 10,
        slots_used: 1,
        ..Status::default()
    };
    for sequence in 1..=20 {
        mesh.registry.status(mesh.now, &registration, busy(sequence, 5));
        mesh.now += Duration::from_secs(1);
    }
    assert!(mesh.views().is_empty());
    mesh.registry.status(mesh.now, &registration, busy(21, 6));
    assert_eq!(mesh.views().len(), 1);
}

#[test]
fn a_decode_node_that_waits_for_a_long_handoff_is_not_frozen() {
    let mut mesh = Mesh::new();
    let registration = mesh.join(hello("d", "decode"));
    for sequence in 1..=60 {
        let waiting = Status { sequence, handoffs_active: 1, ..Status::default() };
        mesh.registry.status(mesh.now, &registration, waiting);
        mesh.now += Duration::from_secs(1);
    }
    assert_eq!(mesh.views().len(), 1);
}

#[test]
fn a_node_that_registers_again_replaces_itself_and_forgets_its_blocks() {
    let mut mesh = Mesh::new();
    let old = mesh.join(hello("d", "decode"));
    let seed = ChainSeed::new(FINGERPRINT, LayoutId([3; 32]), IsolationKey::SHARED);
    let tokens: Vec<_> = (0..9).map(Token).collect();
    let hashes: Vec<_> = BlockTable::new(seed, &tokens, 4).hashes().iter().map(|hash| hash.0).collect();
    mesh.registry.warm(&old, 1, &hashes[..2]);
    assert_eq!(mesh.views()[0].cached_tokens, 8);

    let again = hello("d", "decode");
    let (_, replaced) = mesh.registry.register(mesh.now, peer(&again), again.clone(), 1).unwrap();
    assert_eq!(replaced, Some(0));
    assert_eq!(mesh.views()[0].cached_tokens, 0);
    // The old connection's last words and its end are not the new one's.
    mesh.registry.warm(&old, 1, &hashes[..2]);
    mesh.registry.draining(&old);
    mesh.registry.disconnected(&old);
    assert_eq!(mesh.views()[0].cached_tokens, 0);
}

#[test]
fn a_draining_or_lost_node_is_not_chosen() {
    let mut mesh = Mesh::new();
    let draining = mesh.join(hello("d0", "decode"));
    let lost = mesh.join(hello("d1", "decode"));
    mesh.join(hello("d2", "decode"));
    mesh.registry.draining(&draining);
    mesh.registry.disconnected(&lost);
    let names: Vec<_> = mesh.views().into_iter().map(|view| view.name).collect();
    assert_eq!(names, ["d2"]);
    assert_eq!(mesh.registry.nodes().count(), 2);
}

#[test]
fn what_was_just_placed_counts_before_the_node_says_so() {
    let mut mesh = Mesh::new();
    mesh.join(hello("d", "decode"));
    let load = mesh.registry.node("d").unwrap().load.clone();
    let mut reservation = Reservation::new(&load, 100);
    assert_eq!((mesh.views()[0].requests_in_flight, mesh.views()[0].queue_tokens), (1, 100));
    reservation.prompt_done();
    assert_eq!((mesh.views()[0].requests_in_flight, mesh.views()[0].queue_tokens), (1, 0));
    drop(reservation);
    assert_eq!(mesh.views()[0].requests_in_flight, 0);
}

#[test]
fn a_node_on_all_addresses_is_reached_where_it_came_from() {
    let mut mesh = Mesh::new();
    mesh.join(Hello { address: "0.0.0.0:7001".into(), ..hello("p", "prefill") });
    let candidates = mesh.registry.candidates(&["p".into(), "gone".into()]);
    assert_eq!(candidates.len(), 1);
    assert_eq!(candidates[0].address, "10.0.0.5:7001");
}

#[test]
fn a_prefill_node_that_fits_no_decode_node_is_refused_by_both_values() {
    let mut mesh = Mesh::new();
    mesh.join(hello("d", "decode"));
    let reason = mesh.refuse(Hello { block_tokens: 8, ..hello("p", "prefill") });
    assert_eq!(reason, "block_tokens of p is 8, of d 4");
    let reason = mesh.refuse(Hello { layout: [4; 32], ..hello("p", "prefill") });
    assert!(
        reason.contains(&LayoutId([4; 32]).to_string()) && reason.contains(&LayoutId([3; 32]).to_string())
    );
    mesh.join(Hello { block_tokens: 8, ..hello("d2", "decode") });
    mesh.join(Hello { block_tokens: 8, ..hello("p", "prefill") });
}
