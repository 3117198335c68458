//! Which processor belongs to which node.
//!
//! A prefill keeps its processors busy for seconds. On processors of its own it
//! does not slow down the streams of a decode node next to it.

use anyhow::Context;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Processors per node; empty means that all are shared.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Division {
    /// One set per decode node, lowest numbers first.
    pub(crate) decode: Vec<Vec<usize>>,
    /// One set per prefill node.
    pub(crate) prefill: Vec<Vec<usize>>,
    /// Threads per node, where the sets do not say it; 0 leaves it to the sets.
    pub(crate) threads: usize,
}

impl Division {
    /// Whether nodes must share processors.
    pub(crate) fn is_shared(&self) -> bool {
        self.threads > 0
    }
}

/// Divides `cpus` evenly among the nodes, sets disjoint. What does not divide
/// goes to the decode nodes first: they serve everybody.
pub(crate) fn divide(cpus: &[usize], decode: usize, prefill: usize) -> Division {
    let nodes = decode + prefill;
    if cpus.len() < nodes {
        let threads = (cpus.len() / nodes.max(1)).max(1);
        return Division { decode: vec![vec![]; decode], prefill: vec![vec![]; prefill], threads };
    }
    let (share, extra) = (cpus.len() / nodes, cpus.len() % nodes);
    let mut rest = cpus;
    let mut sets = (0..nodes).map(|node| {
        let (set, tail) = rest.split_at(share + usize::from(node < extra));
        rest = tail;
        set.to_vec()
    });
    let decode = sets.by_ref().take(decode).collect();
    Division { decode, prefill: sets.collect(), threads: 0 }
}

/// Processors that this process may use.
pub(crate) fn allowed() -> anyhow::Result<Vec<usize>> {
    let set = sched_getaffinity(None).context("cannot read the CPU affinity")?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

/// Restricts this thread, and all that it starts from now on, to `cpus`.
/// Nothing happens if `cpus` is empty.
pub(crate) fn pin(cpus: &[usize]) -> anyhow::Result<()> {
    if cpus.is_empty() {
        return Ok(());
    }
    let allowed = allowed()?;
    let mut set = CpuSet::new();
    for &cpu in cpus {
        anyhow::ensure!(allowed.contains(&cpu), "`cpus` names {cpu}, this process may use {allowed:?}");
        set.set(cpu);
    }
    sched_setaffinity(None, &set).with_context(|| format!("cannot use only the CPUs {cpus:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_cpus_give_decode_the_first_and_prefill_the_last() {
        let division = divide(&[0, 1], 1, 1);
        assert_eq!(division, Division { decode: vec![vec![0]], prefill: vec![vec![1]], threads: 0 });
    }

    #[test]
    fn odd_cpu_goes_to_decode() {
        let division = divide(&[2, 3, 5], 1, 1);
        assert_eq!((division.decode, division.prefill), (vec![vec![2, 3]], vec![vec![5]]));
    }

    #[test]
    fn sets_are_disjoint_and_cover_everything() {
        for cpus in 1..40_usize {
            for decode in 1..4 {
                for prefill in 0..4 {
                    let all: Vec<usize> = (0..cpus).collect();
                    let division = divide(&all, decode, prefill);
                    assert_eq!((division.decode.len(), division.prefill.len()), (decode, prefill));
                    let mut used = [division.decode.concat(), division.prefill.concat()].concat();
                    used.sort_unstable();
                    assert_eq!(division.is_shared(), cpus < decode + prefill);
                    assert_eq!(used, if division.is_shared() { vec![] } else { all });
                }
            }
        }
    }

    #[test]
    fn too_few_cpus_are_shared_with_one_thread_each() {
        let division = divide(&[0, 1], 2, 1);
        assert!(division.is_shared());
        assert_eq!(division.threads, 1);
    }

    #[test]
    fn cpu_that_is_not_allowed_is_named() {
        let error = pin(&[CpuSet::MAX_CPU - 1]).unwrap_err().to_string();
        assert!(error.contains(&(CpuSet::MAX_CPU - 1).to_string()), "{error}");
    }
}
