//! A cache against a model: after any sequence of operations, bytes read equal the bytes put, and
//! pages found can be read.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use proptest::prelude::*;

/// The prompts, as arguments of [`keys`]: number, pages shared with prompt 0, and number of pages.
const PROMPTS: [(u8, usize, usize); 4] = [(0, 0, 30), (1, 10, 40), (2, 25, 33), (3, 0, 12)];

/// A step of the test. The first number of `Put`, `Find`, `Get` and `Cancel` is the index of a
/// prompt. The other two numbers of `Put` and `Get` are the two ends of a range of its pages.
/// `Find` looks up at most its second number of leading pages, and reads the found pages. `Cancel`
/// looks up the prompt once, and cancels the prefetches and promotions that this lookup began.
#[derive(Clone, Debug)]
enum Step {
    Put(usize, usize, usize),
    Find(usize, usize),
    Get(usize, usize, usize),
    Cancel(usize),
    Flush,
    /// Closes the cache and reopens it with the list of tiers at this index.
    Open(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let place = || (0..PROMPTS.len(), 0..45_usize, 0..45_usize);
    let step = prop_oneof![
        6 => place().prop_map(|(p, a, b)| Step::Put(p, a, b)),
        5 => (0..PROMPTS.len(), 0..45_usize).prop_map(|(p, n)| Step::Find(p, n)),
        5 => place().prop_map(|(p, a, b)| Step::Get(p, a, b)),
        1 => (0..PROMPTS.len()).prop_map(Step::Cancel),
        1 => Just(Step::Flush),
        2 => (0..5_usize).prop_map(Step::Open),
    ];
    prop::collection::vec(step, 1..25)
}

fn range(of: &[Vec<u8>], a: usize, b: usize) -> std::ops::Range<usize> {
    let (a, b) = (a.min(b).min(of.len()), a.max(b).min(of.len()));
    a..b
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]
    #[test]
    fn bytes_are_right_after_any_operations(steps in steps()) {
        let (dir, remote_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (host, disk, shared) = (host(&dir, 16), disk(&dir, 24), remote(remote_dir.path()));
        let lists: [Vec<String>; 5] = [
            vec![host.clone(), disk.clone(), shared.clone()],
            vec![host.clone(), format!("{disk} write=write_back"), format!("{shared} write=selective(1)")],
            vec![host.clone(), shared.clone()],
            vec![disk.clone(), format!("{shared} write=write_back")],
            vec![host, format!("{disk} write=selective(2)")],
        ];
        let reopen = |list: &Vec<String>| open(&list.iter().map(String::as_str).collect::<Vec<_>>());
        let mut cache = reopen(&lists[0]);
        let mut given = std::collections::HashSet::new();
        for step in steps {
            match step {
                Step::Put(prompt, a, b) => {
                    let (number, fork, pages) = PROMPTS[prompt];
                    let keys = keys(number, fork, pages);
                    let range = range(&keys, a, b);
                    put(&cache, &keys[..range.end], range.start);
                    given.extend(keys[range].iter().cloned());
                }
                Step::Find(prompt, most) => {
                    let (number, fork, pages) = PROMPTS[prompt];
                    let keys = keys(number, fork, pages.min(most));
                    let found = find(&cache, &keys);
                    prop_assert!(keys[..found.local].iter().all(|key| given.contains(key)));
                    prop_assert_eq!(get(&cache, &keys[..found.load], 0).pages, found.load);
                    release(&cache, &found);
                }
                Step::Get(prompt, a, b) => {
                    let (number, fork, pages) = PROMPTS[prompt];
                    let keys = keys(number, fork, pages);
                    let range = range(&keys, a, b);
                    let outcome = get(&cache, &keys[..range.end], range.start);
                    let read = outcome.ok.iter().zip(&keys[range]).filter(|(ok, _)| **ok);
                    prop_assert!(read.into_iter().all(|(_, key)| given.contains(key)));
                }
                Step::Cancel(prompt) => {
                    let (number, fork, pages) = PROMPTS[prompt];
                    let keys = keys(number, fork, pages);
                    let _ = find_once(&cache, &keys);
                    cache.cancel(&scope(), &refs(&keys)).unwrap();
                }
                Step::Flush => cache.flush().unwrap(),
                Step::Open(list) => {
                    cache.close().unwrap();
                    drop(cache);
                    cache = reopen(&lists[list]);
                }
            }
        }
    }
}
