//! Seeds under every mix: no violation; and the same seed is the same run.

use sim::{Campaign, Mix, Options, simulate};

#[test]
fn two_thousand_seeds_under_every_mix_break_no_promise() {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let campaign = Campaign { seeds: 0..2_200, mix: None, requests: 40, threads, logged: false };
    let totals = campaign.run(|_, _| {});
    assert!(totals.failures.is_empty(), "{totals}");
    assert_eq!(totals.runs, 2_200);
    let count = |name| totals.counts.get(name).copied().unwrap_or(0);
    assert!(count("right") > 70_000, "{totals}");
    // The mixes do something: without these the run would show little.
    for name in ["busy", "failed", "left", "refused", "router lost"] {
        assert!(count(name) > 40, "{totals}");
    }
}

/// Seconds are virtual here: they do not depend on the machine.
#[test]
fn a_fault_costs_an_answer_seconds_not_its_patience() {
    for (mix, slowest, all_but_one_in_a_hundred) in [
        (Mix::Calm, 3.0, 1.5),
        (Mix::Links, 16.0, 4.0),
        (Mix::Kills, 12.0, 5.0),
        (Mix::Stops, 10.0, 4.0),
        // The router freezes too, for up to 15 s, and everybody waits for it.
        (Mix::Freezes, 20.0, 15.0),
    ] {
        let campaign = Campaign { seeds: 0..30, mix: Some(mix), requests: 200, threads: 2, logged: false };
        let totals = campaign.run(|_, _| {});
        println!("{mix:?}: {totals}");
        assert!(totals.failures.is_empty(), "{totals}");
        assert!(totals.within(1.0) < slowest && totals.within(0.99) < all_but_one_in_a_hundred, "{totals}");
    }
}

#[test]
fn the_same_seed_is_the_same_run() {
    for mix in Mix::ALL {
        let options = Options { mix, requests: 60, bug: None, logged: true };
        let (first, second) = (simulate(7, &options), simulate(7, &options));
        assert_eq!(first.log, second.log, "{mix:?}");
        assert_eq!(first.digest, second.digest);
        assert_ne!(first.digest, simulate(8, &options).digest);
    }
}
