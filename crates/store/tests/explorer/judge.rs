//! What must be, and what may be, in a store that lost power.

use crate::common::{Open, get, put, sequence};
use ritornello_format::Scope;
use ritornello_store::Outcome;
use std::sync::OnceLock;

/// Sequences of each scope.
pub const NAMES: u64 = 10;
/// Sequences of all scopes.
pub const SEQUENCES: usize = 3 * NAMES as usize;

/// Which pages of a sequence: bit n is page n.
pub type Pages = u64;

/// A scope of the explorer's, and its longest sequence.
pub struct Kind {
    pub scope: Scope,
    pub pages: usize,
    /// By name: the keys.
    keys: Vec<Vec<Vec<u8>>>,
}

impl Kind {
    fn new(name: &str, page_bytes: u64, chained: bool, pages: usize) -> Self {
        let scope = Scope::opaque(name, page_bytes, chained);
        Self { scope, pages, keys: (0..NAMES).map(|name| sequence(name, pages)).collect() }
    }
}

/// Small pages in long runs, unchained ones of two units, and large ones that are split.
pub fn kinds() -> &'static [Kind; 3] {
    static KINDS: OnceLock<[Kind; 3]> = OnceLock::new();
    KINDS.get_or_init(|| {
        [
            Kind::new("small", 300, true, 40),
            Kind::new("alone", 5000, false, 24),
            Kind::new("large", 70_000, true, 5),
        ]
    })
}

/// The kind and the keys of sequence `at`.
pub fn keys_of(at: usize) -> (&'static Kind, &'static [Vec<u8>]) {
    let kind = &kinds()[at / NAMES as usize];
    (kind, &kind.keys[at % NAMES as usize])
}

/// Of every sequence: what is there.
pub fn present(open: &Open) -> Vec<Pages> {
    (0..SEQUENCES)
        .map(|at| {
            let (kind, keys) = keys_of(at);
            let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
            let there = open.store.exists(&kind.scope, &keys).unwrap();
            there.iter().rev().fold(0, |pages, there| pages << 1 | u64::from(*there))
        })
        .collect()
}

/// What every crash must leave, and all that it may leave.
#[derive(Clone)]
pub struct Bounds {
    pub least: Vec<Pages>,
    pub most: Vec<Pages>,
}

impl Bounds {
    /// Everything is durable, and nothing else is.
    pub fn exactly(present: Vec<Pages>) -> Self {
        Self { least: present.clone(), most: present }
    }

    /// Judges a store that came up after a crash; `seed` says which sequences are read.
    pub fn judge(&self, open: &Open, seed: u64) {
        let there = present(open);
        for (at, &pages) in there.iter().enumerate() {
            let (kind, _) = keys_of(at);
            let (least, most) = (self.least[at], self.most[at]);
            assert_eq!(least & !pages, 0, "flushed pages of {at} are gone: {least:b}, {pages:b}");
            assert_eq!(pages & !most, 0, "pages of {at} are back: {most:b}, {pages:b}");
            if kind.scope.chained {
                assert_eq!(pages & (pages + 1), 0, "{at} has a tail without its head: {pages:b}");
            }
        }
        for turn in 0..4 {
            let at = (seed.rotate_left(turn * 16) % SEQUENCES as u64) as usize;
            deliver(open, at, there[at]);
        }
        let scope = &kinds()[0].scope;
        let fresh = sequence(1 << 40, 2);
        assert_eq!(put(&open.store, scope, &fresh, None).pages, 2);
        open.store.flush().unwrap();
        assert_eq!(get(&open.store, scope, &fresh).pages, 2);
        open.store.delete(scope, &[&fresh[0]]).unwrap();
    }
}

/// Every page that is promised comes, with the bytes that are its own.
pub fn deliver(open: &Open, at: usize, pages: Pages) {
    let (kind, keys) = keys_of(at);
    let mut from = 0;
    while from < keys.len() {
        let run = (pages >> from).trailing_ones() as usize;
        if run == 0 {
            from += 1;
            continue;
        }
        let outcome: Outcome = get(&open.store, &kind.scope, &keys[from..from + run]);
        assert_eq!(outcome.pages, run, "pages of {at} from {from} on: {}", outcome.reason);
        from += run;
    }
}

/// Puts the first `count` pages of a sequence.
pub fn put_pages(open: &Open, at: usize, count: usize) -> Outcome {
    let (kind, keys) = keys_of(at);
    put(&open.store, &kind.scope, &keys[..count], None)
}
