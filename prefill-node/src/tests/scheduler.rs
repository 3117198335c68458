use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_block::{IsolationKey, Token};
use proptest::prelude::*;

use super::now;
use crate::scheduler::{
    AGEING, Admission, Chunk, Prompt, PromptId, Scheduler, SchedulerConfig, UNSENT_CHUNKS_FREE,
};

/// The rate of all tests; the scheduler assumes the same before it has measured.
const PER_TOKEN: Duration = Duration::from_millis(2);

fn config(max_resident: usize) -> SchedulerConfig {
    SchedulerConfig {
        block_tokens: 16,
        chunk_tokens: 64,
        max_resident,
        queue_tokens_max: 4000,
        prompts_max: 8,
    }
}

/// Different `salt`, different tokens.
fn prompt(salt: u32, length: usize) -> Prompt {
    let tokens: Arc<[Token]> = (0..length as u32).map(|index| Token(salt * 100_000 + index)).collect();
    Prompt { tokens, export_from: 0, isolation: IsolationKey::SHARED }
}

fn admit(scheduler: &mut Scheduler, now: Instant, prompt: Prompt) -> PromptId {
    match scheduler.admit(now, prompt) {
        Admission::Queued { id, .. } => id,
        other => panic!("{other:?}"),
    }
}

/// Plans, computes and sends one chunk.
fn step(scheduler: &mut Scheduler, clock: &mut Instant) -> Option<Chunk> {
    let chunk = scheduler.plan(*clock)?;
    let took = if chunk.compute { PER_TOKEN * chunk.range.len() as u32 } else { Duration::ZERO };
    *clock += took;
    scheduler.chunk_done(&chunk, took);
    if !chunk.export.is_empty() {
        scheduler.chunk_sent(chunk.id);
    }
    Some(chunk)
}

fn drain(scheduler: &mut Scheduler, clock: &mut Instant) -> Vec<Chunk> {
    std::iter::from_fn(|| step(scheduler, clock)).collect()
}

#[test]
fn a_shorter_prompt_goes_first_from_the_next_chunk_on() {
    let (mut scheduler, mut clock) = (Scheduler::new(config(2)), now());
    let long = admit(&mut scheduler, clock, prompt(1, 640));
    assert_eq!(step(&mut scheduler, &mut clock).unwrap().id, long);
    let short = admit(&mut scheduler, clock, prompt(2, 100));
    let order: Vec<PromptId> = drain(&mut scheduler, &mut clock).iter().map(|chunk| chunk.id).collect();
    assert_eq!(order[..2], [short, short]);
    assert!(order[2..].iter().all(|&id| id == long));
}

#[test]
fn one_session_serves_one_prompt_to_its_end() {
    let (mut scheduler, mut clock) = (Scheduler::new(config(1)), now());
    let long = admit(&mut scheduler, clock, prompt(1, 640));
    step(&mut scheduler, &mut clock);
    let short = admit(&mut scheduler, clock, prompt(2, 100));
    let order: Vec<PromptId> = drain(&mut scheduler, &mut clock).iter().map(|chunk| chunk.id).collect();
    assert_eq!(order.iter().position(|&id| id == short), Some(9));
    assert_eq!(order.iter().filter(|&&id| id == long).count(), 9);
}

#[test]
fn chunks_end_at_block_boundaries_and_with_the_prompt() {
    let (mut scheduler, mut clock) = (Scheduler::new(config(1)), now());
    admit(&mut scheduler, clock, prompt(1, 150));
    let chunks = drain(&mut scheduler, &mut clock);
    let ranges: Vec<_> = chunks.iter().map(|chunk| chunk.range.clone()).collect();
    assert_eq!(ranges, [0..64, 64..128, 128..150]);
    assert!(chunks[0].first && chunks[2].last && !chunks[1].last);
}

#[test]
fn blocks_that_the_receiver_has_are_computed_and_not_exported() {
    let (mut scheduler, mut clock) = (Scheduler::new(config(1)), now());
    admit(&mut scheduler, clock, Prompt { export_from: 80, ..prompt(1, 150) });
    let chunks = drain(&mut scheduler, &mut clock);
    let exports: Vec<_> = chunks.iter().map(|chunk| chunk.export.clone()).collect();
    assert_eq!(exports, [64..64, 80..128, 128..150]);
    assert!(chunks.iter().all(|chunk| chunk.compute));
}

#[test]
fn a_shared_prefix_is_exported_and_only_the_rest_computed() {
    let (mut scheduler, mut clock) = (Scheduler::new(config(1)), now());
    admit(&mut scheduler, clock, prompt(1, 100));
    drain(&mut scheduler, &mut clock);
    admit(&mut scheduler, clock, prompt(1, 200));
    let chunks = drain(&mut scheduler, &mut clock);
    let got: Vec<_> = chunks.iter().map(|chunk| (chunk.range.clone(), chunk.compute, chunk.held)).collect();
    let expected = [(0..64, false, 96), (64..96, false, 96), (96..160, true, 96), (160..200, true, 160)];
    assert_eq!(got, expected);
    assert!(chunks.iter().all(|chunk| chunk.reused == 96));
}

#[test]
fn a_prompt_seen_before_needs_no_computing() {
    let (mut scheduler, mut clock) = (Scheduler::new(config(1)), now());
    admit(&mut scheduler, clock, prompt(1, 100));
    drain(&mut scheduler, &mut clock);
    admit(&mut scheduler, clock, prompt(1, 100));
    let chunks = drain(&mut scheduler, &mut clock);
    assert!(chunks.iter().all(|chunk| !chunk.compute));
    assert_eq!(chunks.last().map(|chunk| chunk.range.end), Some(100));
}

#[test]
fn a_removed_prompt_is_never_planned_and_leaves_its_work_to_others() {
    let (mut scheduler, mut clock) = (Scheduler::new(config(1)), now());
    let gone = admit(&mut scheduler, clock, prompt(1, 640));
    let waiting = admit(&mut scheduler, clock, prompt(2, 900));
    let running = scheduler.plan(clock).unwrap();
    assert_eq!(running.id, gone);
    scheduler.remove(gone);
    scheduler.remove(waiting);
    assert_eq!(scheduler.figures().queue_tokens, 0);
    scheduler.chunk_done(&running, PER_TOKEN * 64);
    assert!(scheduler.plan(clock).is_none());
    // The chunk that was under way is not lost.
    admit(&mut scheduler, clock, prompt(1, 640));
    assert_eq!(drain(&mut scheduler, &mut clock)[0].reused, 64);
}

#[test]
fn a_failed_chunk_empties_the_session_and_ends_the_prompt() {
    let (mut scheduler, mut clock) = (Scheduler::new(config(1)), now());
    admit(&mut scheduler, clock, prompt(1, 640));
    step(&mut scheduler, &mut clock);
    let chunk = scheduler.plan(clock).unwrap();
    scheduler.chunk_failed(&chunk);
    assert_eq!(scheduler.figures(), Default::default());
    admit(&mut scheduler, clock, prompt(1, 640));
    assert_eq!(scheduler.plan(clock).unwrap().held, 0);
}

#[test]
fn a_slow_receiver_holds_up_its_own_prompt_only() {
    let (mut scheduler, clock) = (Scheduler::new(config(2)), now());
    let slow = admit(&mut scheduler, clock, prompt(1, 640));
    for _ in 0..UNSENT_CHUNKS_FREE {
        let chunk = scheduler.plan(clock).unwrap();
        assert_eq!(chunk.id, slow);
        scheduler.chunk_done(&chunk, Duration::ZERO);
    }
    assert!(scheduler.plan(clock).is_none());
    let other = admit(&mut scheduler, clock, prompt(2, 3000));
    assert_eq!(scheduler.plan(clock).map(|chunk| chunk.id), Some(other));
    scheduler.chunk_sent(slow);
}

#[test]
fn a_slow_receiver_costs_memory_before_it_costs_others_their_turn() {
    let (mut scheduler, clock) = (Scheduler::new(config(1)), now());
    scheduler.allow_unsent(10 * 64);
    let slow = admit(&mut scheduler, clock, prompt(1, 8 * 64));
    for _ in 0..8 {
        let chunk = scheduler.plan(clock).unwrap();
        assert_eq!(chunk.id, slow);
        scheduler.chunk_done(&chunk, Duration::ZERO);
    }
    // All computed, nothing sent: the session is free, and two chunks fit beside it.
    let other = admit(&mut scheduler, clock, prompt(2, 3000));
    for _ in 0..UNSENT_CHUNKS_FREE {
        let chunk = scheduler.plan(clock).unwrap();
        assert_eq!(chunk.id, other);
        scheduler.chunk_done(&chunk, Duration::ZERO);
    }
    assert!(scheduler.plan(clock).is_none(), "memory is full and four chunks wait");
    scheduler.chunk_sent(slow);
    assert!(scheduler.plan(clock).is_none(), "11 chunks wait, and 10 are allowed");
    for _ in 0..2 {
        scheduler.chunk_sent(slow);
    }
    assert_eq!(scheduler.plan(clock).map(|chunk| chunk.id), Some(other));
    // What a prompt that is gone has not sent does not count.
    scheduler.remove(slow);
    assert_eq!(scheduler.plan(clock).map(|chunk| chunk.id), Some(other));
}

#[test]
fn a_full_queue_says_which_limit() {
    let (mut scheduler, clock) = (Scheduler::new(config(1)), now());
    admit(&mut scheduler, clock, prompt(1, 5000));
    let full = scheduler.admit(clock, prompt(2, 1));
    assert_eq!(full, Admission::TokensFull { queued: 5000, limit: 4000 });
    let mut scheduler = Scheduler::new(config(1));
    for salt in 0..8 {
        admit(&mut scheduler, clock, prompt(salt, 10));
    }
    assert_eq!(scheduler.admit(clock, prompt(9, 10)), Admission::PromptsFull { limit: 8 });
}

#[test]
fn tokens_ahead_counts_what_runs_first() {
    let (mut scheduler, mut clock) = (Scheduler::new(config(1)), now());
    admit(&mut scheduler, clock, prompt(1, 1000));
    step(&mut scheduler, &mut clock);
    admit(&mut scheduler, clock, prompt(2, 2000));
    let answer = scheduler.admit(clock, prompt(3, 100));
    let Admission::Queued { tokens_ahead, expected_start, .. } = answer else { panic!("{answer:?}") };
    assert_eq!(tokens_ahead, 936, "the resident, not the longer one that waits");
    assert_eq!(expected_start.as_millis(), 1872);
}

#[derive(Clone, Debug)]
enum Op {
    Arrive { salt: u32, length: usize, have_blocks: usize },
    Remove(usize),
    Step,
    Sent(usize),
    Wait(u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (0u32..4, 1usize..1200, 0usize..10).prop_map(|(salt, length, have_blocks)| Op::Arrive {
            salt,
            length,
            have_blocks
        }),
        1 => any::<usize>().prop_map(Op::Remove),
        8 => Just(Op::Step),
        4 => any::<usize>().prop_map(Op::Sent),
        1 => (0u64..3000).prop_map(Op::Wait),
    ]
}

/// What the test knows of a prompt.
struct Known {
    arrived: Instant,
    length: usize,
    /// Next token that must be exported or, before `export_from`, computed.
    next: usize,
    export_from: usize,
    /// Tokens computed or reused.
    has: usize,
    begun: bool,
    unsent: usize,
}

impl Known {
    fn key(&self) -> Instant {
        self.arrived + PER_TOKEN.mul_f64((self.length - self.has) as f64 / AGEING)
    }
}

proptest! {
    /// Resident bound, exact coverage, memory bound, queue bound, and the
    /// starvation bound: no runnable prompt is passed by one that arrived later
    /// than its own key.
    #[test]
    fn bounds_hold_for_any_order_of_events(max_resident in 1usize..4, ops in prop::collection::vec(op(), 1..200)) {
        let (mut scheduler, mut clock) = (Scheduler::new(config(max_resident)), now());
        let mut known: BTreeMap<PromptId, Known> = BTreeMap::new();
        for op in ops {
            match op {
                Op::Arrive { salt, length, have_blocks } => {
                    let export_from = (have_blocks * 16).min((length - 1) / 16 * 16);
                    let prompt = Prompt { export_from, ..prompt(salt, length) };
                    if let Admission::Queued { id, .. } = scheduler.admit(clock, prompt) {
                        let entry = Known {
                            arrived: clock, length, next: 0, export_from, has: 0, begun: false, unsent: 0,
                        };
                        known.insert(id, entry);
                    }
                }
                Op::Remove(pick) => {
                    if let Some(id) = nth(&known, pick) {
                        scheduler.remove(id);
                        known.remove(&id);
                    }
                }
                Op::Sent(pick) => {
                    if let Some(id) = nth(&known, pick) {
                        scheduler.chunk_sent(id);
                        let entry = known.get_mut(&id).unwrap();
                        entry.unsent = entry.unsent.saturating_sub(1);
                    }
                }
                Op::Wait(millis) => clock += Duration::from_millis(millis),
                Op::Step => {
                    let idle = known.values().filter(|entry| entry.begun).count() < max_resident;
                    let runnable = |entry: &Known| {
                        if entry.begun { entry.unsent < UNSENT_CHUNKS_FREE } else { idle }
                    };
                    let Some(chunk) = scheduler.plan(clock) else {
                        prop_assert!(!known.values().any(runnable), "idle beside runnable prompts");
                        continue;
                    };
                    let chosen = known.get(&chunk.id).expect("a removed prompt was planned");
                    prop_assert!(runnable(chosen));
                    for other in known.values().filter(|entry| runnable(entry)) {
                        let slack = Duration::from_millis(1); // floating point
                        prop_assert!(chosen.arrived <= other.key() + slack, "overtaken too late");
                    }
                    check_chunk(&chunk, chosen)?;
                    let took = if chunk.compute { PER_TOKEN * chunk.range.len() as u32 } else { Duration::ZERO };
                    clock += took;
                    scheduler.chunk_done(&chunk, took);
                    let entry = known.get_mut(&chunk.id).unwrap();
                    entry.begun = true;
                    entry.next = chunk.range.end;
                    entry.has = chunk.range.end.max(chunk.reused);
                    entry.unsent += usize::from(!chunk.export.is_empty());
                    prop_assert!(entry.unsent <= UNSENT_CHUNKS_FREE);
                    if chunk.last {
                        known.remove(&chunk.id);
                    }
                }
            }
            let figures = scheduler.figures();
            let longest = known.values().map(|entry| entry.length).max().unwrap_or(0);
            prop_assert!(figures.residents_used <= max_resident);
            prop_assert_eq!(figures.residents_used, known.values().filter(|entry| entry.begun).count());
            prop_assert_eq!(figures.queue_tokens, known.values().map(|entry| entry.length - entry.has).sum::<usize>());
            prop_assert!(figures.queue_tokens <= 4000.max(longest));
        }
    }
}

fn check_chunk(chunk: &Chunk, known: &Known) -> Result<(), TestCaseError> {
    prop_assert!(!chunk.range.is_empty() && chunk.range.len() <= 64);
    prop_assert_eq!(chunk.first, !known.begun);
    prop_assert_eq!(chunk.last, chunk.range.end == known.length);
    prop_assert!(chunk.last || chunk.range.end.is_multiple_of(16));
    let start = if chunk.first { chunk.reused.min(known.export_from) } else { known.next };
    prop_assert_eq!(chunk.range.start, start);
    prop_assert_eq!(chunk.export.end, chunk.range.end);
    prop_assert_eq!(chunk.export.start, chunk.range.start.max(known.export_from).min(chunk.range.end));
    match chunk.compute {
        true => prop_assert_eq!(chunk.held, chunk.range.start),
        false => prop_assert!(chunk.range.end <= chunk.held),
    }
    Ok(())
}

fn nth(known: &BTreeMap<PromptId, Known>, pick: usize) -> Option<PromptId> {
    known.keys().nth(pick % known.len().max(1)).copied()
}
