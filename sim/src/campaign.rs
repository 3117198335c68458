//! Many runs on all cores, and their sum.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use clap::Args;

use crate::{Findings, Mix, Options, simulate};

/// `segue sim`: the mesh in virtual time, under faults, checked against an oracle.
#[derive(Args, Clone, Debug)]
pub struct SimArgs {
    /// Runs.
    #[arg(long, default_value_t = 100, value_name = "N")]
    pub seeds: u64,
    /// Seed of the first run; the others follow it.
    #[arg(long, default_value_t = 0, value_name = "SEED")]
    pub first: u64,
    /// Requests of each run.
    #[arg(long, default_value_t = 100, value_name = "N")]
    pub requests: usize,
    /// What goes wrong; by default the mixes take turns.
    #[arg(long, value_name = "MIX")]
    pub mix: Option<Mix>,
    /// Runs at once; 0 is one per core.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub threads: usize,
    /// Print every event of every run: for one seed that failed.
    #[arg(long)]
    pub trace: bool,
}

/// What to run.
#[derive(Clone, Debug)]
pub struct Campaign {
    /// First seed and number of seeds.
    pub seeds: std::ops::Range<u64>,
    /// One mix, or all in turn.
    pub mix: Option<Mix>,
    /// Requests of each run.
    pub requests: usize,
    /// Runs at once.
    pub threads: usize,
    /// Whether traces are kept.
    pub logged: bool,
}

/// The sum of many runs.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// Runs.
    pub runs: u64,
    /// Requests by how they ended.
    pub counts: BTreeMap<&'static str, u64>,
    /// How long each right answer took, in seconds of virtual time.
    pub seconds: Vec<f32>,
    /// Failed runs: the command that repeats one, and what it found.
    pub failures: Vec<(String, Findings)>,
}

impl Campaign {
    /// The mix of a seed.
    pub fn mix_of(&self, seed: u64) -> Mix {
        self.mix.unwrap_or(Mix::ALL[(seed % Mix::ALL.len() as u64) as usize])
    }

    /// Runs all seeds; `each` hears of every run.
    pub fn run(&self, each: impl Fn(u64, &Findings) + Sync) -> Totals {
        let next = AtomicU64::new(self.seeds.start);
        let totals = Mutex::new(Totals::default());
        std::thread::scope(|scope| {
            for _ in 0..self.threads.max(1) {
                scope.spawn(|| {
                    loop {
                        let seed = next.fetch_add(1, Ordering::Relaxed);
                        if seed >= self.seeds.end {
                            return;
                        }
                        let findings = self.run_one(seed);
                        each(seed, &findings);
                        self.add(&mut totals.lock().unwrap_or_else(PoisonError::into_inner), seed, findings);
                    }
                });
            }
        });
        totals.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn run_one(&self, seed: u64) -> Findings {
        let mix = self.mix_of(seed);
        simulate(seed, &Options { mix, requests: self.requests, bug: None, logged: self.logged })
    }

    fn add(&self, totals: &mut Totals, seed: u64, findings: Findings) {
        totals.runs += 1;
        for (name, count) in &findings.counts {
            *totals.counts.entry(name).or_default() += count;
        }
        totals.seconds.extend_from_slice(&findings.seconds);
        if !findings.violations.is_empty() {
            totals.failures.push((self.command(seed), findings));
        }
    }

    fn command(&self, seed: u64) -> String {
        let mix = clap::ValueEnum::to_possible_value(&self.mix_of(seed));
        let mix = mix.map(|value| value.get_name().to_owned()).unwrap_or_default();
        format!("segue sim --first {seed} --seeds 1 --mix {mix} --requests {} --trace", self.requests)
    }
}

impl Totals {
    /// Seconds in which this share of the right answers was there.
    pub fn within(&self, share: f64) -> f32 {
        let mut sorted = self.seconds.clone();
        sorted.sort_by(f32::total_cmp);
        let last = sorted.len().saturating_sub(1);
        sorted.get((last as f64 * share).round() as usize).copied().unwrap_or(0.0)
    }

    /// Requests in all.
    pub fn requests(&self) -> u64 {
        self.counts.values().sum()
    }
}

impl std::fmt::Display for Totals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} runs, {} requests:", self.runs, self.requests())?;
        for (name, count) in &self.counts {
            write!(f, " {count} {name}")?;
        }
        let [half, most, all] = [0.5, 0.99, 1.0].map(|share| self.within(share));
        write!(f, "; right answers took {half:.2} s (half), {most:.2} s (99 %), {all:.2} s (all) at most")?;
        write!(f, "; {} runs with violations", self.failures.len())?;
        for (command, findings) in &self.failures {
            write!(f, "\n\n{command}")?;
            for violation in &findings.violations {
                write!(f, "\n  {violation}")?;
            }
        }
        Ok(())
    }
}

/// How often progress is told.
const TELL_EVERY: u64 = 100;

/// Runs the command; an error if any run found something.
pub fn command(args: &SimArgs) -> anyhow::Result<()> {
    let threads = match args.threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    };
    let campaign = Campaign {
        seeds: args.first..args.first.saturating_add(args.seeds),
        mix: args.mix,
        requests: args.requests,
        threads,
        logged: args.trace,
    };
    let done = AtomicU64::new(0);
    let totals = campaign.run(|seed, findings| {
        if args.trace {
            println!("seed {seed}, digest {}", findings.digest);
            findings.log.iter().for_each(|line| println!("{line}"));
        }
        let done = done.fetch_add(1, Ordering::Relaxed) + 1;
        for violation in &findings.violations {
            eprintln!("seed {seed}: {violation}");
        }
        if done.is_multiple_of(TELL_EVERY) {
            eprintln!("{done} of {} runs", args.seeds);
        }
    });
    println!("{totals}");
    anyhow::ensure!(
        totals.failures.is_empty(),
        "{} of {} runs found something",
        totals.failures.len(),
        totals.runs
    );
    Ok(())
}
