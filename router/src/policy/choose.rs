//! The choice itself.

use std::cmp::Reverse;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

use super::{
    Arm, Decision, DecodeView, Estimates, Fallback, Mode, Policy, Prefill, PrefillView, Refusal, RequestView,
};

/// Chooses among `nodes`; the same arguments give the same choice.
pub fn choose(
    policy: &Policy,
    request: &RequestView,
    nodes: &[DecodeView],
    seed: u64,
) -> Result<Decision, Refusal> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let node = decode_node(request, nodes, &mut rng)?;
    let cached_tokens = node.cached_tokens.min(request.prompt_tokens);
    let uncached_tokens = request.prompt_tokens - cached_tokens;
    let candidates = candidates(request, node, &mut rng);
    let (prefill, rule) = match wish(policy, request, uncached_tokens, node) {
        (Arm::Local, rule) => (Prefill::Local, rule),
        (Arm::Remote, rule) if !candidates.is_empty() => (remote(&candidates), rule),
        (Arm::Remote, _) if policy.fallback == Fallback::Local => (Prefill::Local, "no-prefill-node"),
        (Arm::Remote, _) => return Err(Refusal::NoPrefillNode),
    };
    let prefill_queue_tokens = match prefill {
        Prefill::Local => 0,
        Prefill::Remote(_) => candidates[0].queue_tokens,
    };
    let estimates = Estimates { prompt_tokens: request.prompt_tokens, uncached_tokens, prefill_queue_tokens };
    Ok(Decision { decode: node.name.clone(), prefill, rule, estimates })
}

/// Room first: a warm prefix on a node whose slots all run would have to wait
/// for one of them. Then the longest warm prefix, then the least work.
fn decode_node<'a>(
    request: &RequestView,
    nodes: &'a [DecodeView],
    rng: &mut SmallRng,
) -> Result<&'a DecodeView, Refusal> {
    let longest = nodes.iter().map(|node| node.context_tokens).max().ok_or(Refusal::NoDecodeNode)?;
    let mut fitting: Vec<_> =
        nodes.iter().filter(|node| request.needed_tokens <= node.context_tokens).collect();
    fitting.shuffle(rng);
    fitting
        .into_iter()
        .min_by_key(|node| {
            (
                node.requests_in_flight >= node.slots,
                Reverse(node.cached_tokens.min(request.prompt_tokens)),
                node.requests_in_flight,
                node.queue_tokens,
                Reverse(node.slots.saturating_sub(node.slots_used)),
            )
        })
        .ok_or(Refusal::TooLong { needed: request.needed_tokens, longest })
}

/// The arm that the rules want, whether or not a prefill node is there.
fn wish(policy: &Policy, request: &RequestView, uncached: usize, node: &DecodeView) -> (Arm, &'static str) {
    match asked(policy, request, uncached) {
        // The decode node always computes the last prompt token itself, so with
        // one token to go there is nothing that another node could send.
        (Arm::Remote, _) if uncached <= 1 => (Arm::Local, "nothing-to-prefill"),
        (Arm::Remote, _) if !node.installs_blocks => (Arm::Local, "blocks-unsupported"),
        wish => wish,
    }
}

fn asked(policy: &Policy, request: &RequestView, uncached: usize) -> (Arm, &'static str) {
    match (request.arm, policy.mode) {
        (Some(Arm::Local), _) => (Arm::Local, "override-local"),
        (Some(Arm::Remote), _) => (Arm::Remote, "override-remote"),
        (None, Mode::AlwaysLocal) => (Arm::Local, "always-local"),
        (None, Mode::AlwaysRemote) => (Arm::Remote, "always-remote"),
        (None, Mode::Threshold) if uncached < policy.local_below_tokens => (Arm::Local, "short"),
        (None, Mode::Threshold) => (Arm::Remote, "long"),
    }
}

/// Prefill nodes whose context holds the prompt, shortest queue first.
fn candidates<'a>(request: &RequestView, node: &'a DecodeView, rng: &mut SmallRng) -> Vec<&'a PrefillView> {
    let mut fitting: Vec<_> =
        node.prefill.iter().filter(|prefill| request.prompt_tokens <= prefill.context_tokens).collect();
    fitting.shuffle(rng);
    fitting.sort_by_key(|prefill| prefill.queue_tokens);
    fitting
}

fn remote(candidates: &[&PrefillView]) -> Prefill {
    Prefill::Remote(candidates.iter().map(|prefill| prefill.name.clone()).collect())
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn prefill(name: &str, queue_tokens: u64) -> PrefillView {
        PrefillView { name: name.into(), queue_tokens, context_tokens: 8192 }
    }

    fn decode(name: &str) -> DecodeView {
        DecodeView {
            name: name.into(),
            cached_tokens: 0,
            requests_in_flight: 0,
            queue_tokens: 0,
            slots: 8,
            slots_used: 0,
            context_tokens: 8192,
            installs_blocks: true,
            prefill: vec![prefill("p", 0)],
        }
    }

    fn request(prompt_tokens: usize) -> RequestView {
        RequestView { prompt_tokens, needed_tokens: prompt_tokens + 1, arm: None }
    }

    fn rule(policy: &Policy, request: &RequestView, nodes: &[DecodeView]) -> &'static str {
        choose(policy, request, nodes, 0).unwrap().rule
    }

    #[test]
    fn the_threshold_counts_uncached_tokens_not_the_prompt() {
        let policy = Policy::default();
        assert_eq!(rule(&policy, &request(511), &[decode("d")]), "short");
        assert_eq!(rule(&policy, &request(512), &[decode("d")]), "long");
        let warm = DecodeView { cached_tokens: 3_900, ..decode("d") };
        let decision = choose(&policy, &request(4_400), &[warm], 0).unwrap();
        assert_eq!((decision.rule, decision.estimates.uncached_tokens), ("short", 500));
    }

    #[test]
    fn a_cold_short_prompt_stays_local_whatever_its_share() {
        let decision = choose(&Policy::default(), &request(60), &[decode("d")], 0).unwrap();
        assert_eq!(decision.prefill, Prefill::Local);
    }

    #[test]
    fn without_a_prefill_node_the_policy_says_what_happens() {
        let alone = DecodeView { prefill: Vec::new(), ..decode("d") };
        let local = Policy { mode: Mode::AlwaysRemote, ..Policy::default() };
        let refuse = Policy { fallback: Fallback::Refuse, ..local };
        let decision = choose(&local, &request(60), std::slice::from_ref(&alone), 0).unwrap();
        assert_eq!((decision.prefill, decision.rule), (Prefill::Local, "no-prefill-node"));
        assert_eq!(choose(&refuse, &request(60), &[alone], 0), Err(Refusal::NoPrefillNode));
    }

    #[test]
    fn a_prefill_node_with_a_shorter_context_is_no_candidate() {
        let mut node = decode("d");
        node.prefill[0].context_tokens = 1_000;
        assert_eq!(rule(&Policy::default(), &request(4_000), &[node]), "no-prefill-node");
    }

    #[test]
    fn an_override_beats_the_mode() {
        for mode in [Mode::AlwaysLocal, Mode::AlwaysRemote, Mode::Threshold] {
            let policy = Policy { mode, ..Policy::default() };
            let local = RequestView { arm: Some(Arm::Local), ..request(4_000) };
            let remote = RequestView { arm: Some(Arm::Remote), ..request(60) };
            assert_eq!(rule(&policy, &local, &[decode("d")]), "override-local");
            assert_eq!(rule(&policy, &remote, &[decode("d")]), "override-remote");
        }
    }

    #[test]
    fn a_prompt_that_is_warm_but_for_its_last_token_has_nothing_to_prefill() {
        let policy = Policy { mode: Mode::AlwaysRemote, ..Policy::default() };
        let warm = DecodeView { cached_tokens: 4_000, ..decode("d") };
        assert_eq!(rule(&policy, &request(4_001), &[warm]), "nothing-to-prefill");
    }

    #[test]
    fn a_model_that_cannot_be_cut_into_blocks_stays_local() {
        let node = DecodeView { installs_blocks: false, ..decode("d") };
        let asked = RequestView { arm: Some(Arm::Remote), ..request(4_000) };
        let never = Policy { mode: Mode::AlwaysLocal, ..Policy::default() };
        assert_eq!(
            rule(&Policy::default(), &request(4_000), std::slice::from_ref(&node)),
            "blocks-unsupported"
        );
        assert_eq!(rule(&never, &asked, &[node]), "blocks-unsupported");
    }

    #[test]
    fn the_longest_warm_prefix_wins_unless_its_node_is_full() {
        let warm = DecodeView { cached_tokens: 640, requests_in_flight: 7, ..decode("warm") };
        let full = DecodeView { requests_in_flight: 8, ..warm.clone() };
        let chosen = |node| choose(&Policy::default(), &request(700), &[node, decode("cold")], 0);
        assert_eq!(chosen(warm).unwrap().decode, "warm");
        assert_eq!(chosen(full).unwrap().decode, "cold");
    }

    #[test]
    fn a_prompt_beyond_every_context_is_refused_with_both_numbers() {
        let refusal = choose(&Policy::default(), &request(9_000), &[decode("d")], 0).unwrap_err();
        assert_eq!(refusal, Refusal::TooLong { needed: 9_001, longest: 8_192 });
    }

    #[test]
    fn ties_are_spread_over_all_nodes_and_candidates() {
        let mut counts: HashMap<String, usize> = HashMap::new();
        let prefill = vec![prefill("p0", 0), prefill("p1", 0)];
        let nodes = ["d0", "d1"].map(|name| DecodeView { prefill: prefill.clone(), ..decode(name) });
        for seed in 0..400 {
            let decision = choose(&Policy::default(), &request(4_000), &nodes, seed).unwrap();
            let Prefill::Remote(candidates) = decision.prefill else { panic!("local") };
            *counts.entry(decision.decode).or_default() += 1;
            *counts.entry(candidates[0].clone()).or_default() += 1;
        }
        assert!(counts.len() == 4 && counts.values().all(|count| (150..=250).contains(count)), "{counts:?}");
    }

    #[test]
    fn the_shortest_prefill_queue_comes_first() {
        let node = DecodeView {
            prefill: vec![prefill("busy", 9_000), prefill("idle", 0), prefill("half", 400)],
            ..decode("d")
        };
        let decision = choose(&Policy::default(), &request(4_000), &[node], 3).unwrap();
        assert_eq!(decision.prefill, Prefill::Remote(vec!["idle".into(), "half".into(), "busy".into()]));
    }

    fn any_node() -> impl Strategy<Value = DecodeView> {
        let figures = (0..9usize, 0..5_000usize, 0..9usize, 0..9_000u64, 64..8_192usize, any::<bool>());
        let queues = prop::collection::vec(0..9_000u64, 0..3);
        (figures, queues).prop_map(|((slots, cached, in_flight, queue, context, installs), queues)| {
            DecodeView {
                name: format!("d{slots}-{cached}-{in_flight}-{queue}"),
                cached_tokens: cached,
                requests_in_flight: in_flight,
                queue_tokens: queue,
                slots,
                slots_used: in_flight.min(slots),
                context_tokens: context,
                installs_blocks: installs,
                prefill: queues.iter().map(|&queue| prefill(&format!("p{queue}"), queue)).collect(),
            }
        })
    }

    fn any_policy() -> impl Strategy<Value = Policy> {
        let modes = prop_oneof![Just(Mode::AlwaysLocal), Just(Mode::AlwaysRemote), Just(Mode::Threshold)];
        let fallbacks = prop_oneof![Just(Fallback::Local), Just(Fallback::Refuse)];
        (modes, 0..3_000usize, fallbacks).prop_map(|(mode, local_below_tokens, fallback)| Policy {
            mode,
            local_below_tokens,
            fallback,
        })
    }

    proptest! {
        #[test]
        fn every_choice_fits_and_its_order_does_not_matter(
            policy in any_policy(),
            mut nodes in prop::collection::vec(any_node(), 0..6),
            prompt_tokens in 1..9_000usize,
            answer_tokens in 1..500usize,
            arm in prop_oneof![Just(None), Just(Some(Arm::Local)), Just(Some(Arm::Remote))],
            seed: u64,
        ) {
            let request = RequestView { prompt_tokens, needed_tokens: prompt_tokens + answer_tokens, arm };
            let choice = choose(&policy, &request, &nodes, seed);
            prop_assert_eq!(&choice, &choose(&policy, &request, &nodes, seed));
            nodes.reverse();
            let reversed = choose(&policy, &request, &nodes, seed);
            prop_assert_eq!(choice.is_ok(), reversed.is_ok());
            let Ok(decision) = choice else { return Ok(()) };
            let node = nodes.iter().find(|node| node.name == decision.decode).unwrap();
            prop_assert!(request.needed_tokens <= node.context_tokens);
            prop_assert!(decision.estimates.uncached_tokens <= prompt_tokens);
            if let Prefill::Remote(names) = &decision.prefill {
                prop_assert!(!names.is_empty() && node.installs_blocks);
                prop_assert!(arm != Some(Arm::Local));
                prop_assert!(names.iter().all(|name| node.prefill.iter().any(|p| p.name == *name)));
            }
        }
    }
}
