//! The checker sees what it is there for: each planted defect is found soon.

use sim::{Bug, Mix, Options, simulate};

/// Runs `bug` until something shows; returns what.
fn found(bug: Bug, mix: Mix) -> Option<String> {
    const SEEDS: u64 = 40;
    (0..SEEDS).find_map(|seed| {
        let findings = simulate(seed, &Options { mix, requests: 100, bug: Some(bug), logged: false });
        findings.violations.into_iter().next()
    })
}

/// Where each defect shows, and a word of how.
fn sign(bug: Bug) -> (Mix, &'static str) {
    match bug {
        Bug::ReplayDropsToken | Bug::ReplayForgetsAnswer => (Mix::Kills, "text"),
        Bug::SlotKept => (Mix::Clients, "slots_used"),
        Bug::StagingKept => (Mix::Kills, "staged_bytes"),
        Bug::SalvageTooMuch => (Mix::Kills, "text"),
        Bug::TruncateLate | Bug::SessionNotCut => (Mix::Calm, "text"),
        Bug::WakeupLost => (Mix::Calm, "no end"),
    }
}

#[test]
fn every_planted_bug_is_found() {
    for bug in Bug::ALL {
        let (mix, word) = sign(bug);
        let violation = found(bug, mix).unwrap_or_else(|| panic!("{bug:?} was not found under {mix:?}"));
        println!("{bug:?}: {violation}");
        assert!(violation.contains(word), "{bug:?}: {violation}");
    }
}
