//! The scopes and sequences of a history, and the bytes of each page, which follow from its key.

use crate::common::{self, refs, sequence};
use ritornello_format::{Result, Scope};
use ritornello_store::{Outcome, PutOptions, Store};
use ritornello_volume::page_memory::{BorrowedPages, BorrowedPagesMut};
use ritornello_volume::transfer::Control;
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::OnceLock;

pub const SEQUENCES_PER_KIND: u64 = 10;
pub const KINDS: usize = 4;
pub const SEQUENCES: usize = KINDS * SEQUENCES_PER_KIND as usize;
/// Index of the scope whose pages are bfloat16 numbers, for the codecs.
pub const NUMBERS: usize = 3;
/// Length of a large page in bytes, in histories with split pages: 256 units. The page and a header
/// do not fit into a segment, so the store always splits the page into several extents.
const SPLIT_PAGE: u64 = 1_045_000;
/// Length above which pages are divided over all volumes, in histories with striped pages. The
/// pieces of a page of [`SPLIT_PAGE`] bytes are then at least 256 KiB long on up to four volumes.
pub const STRIPED_FROM: u64 = 768 << 10;

thread_local! {
    /// Whether the large pages of the current history are so long that the store splits them; a
    /// history runs in one thread.
    static HAS_SPLIT_PAGES: Cell<bool> = const { Cell::new(false) };
}

/// A set of pages of one sequence: bit n is page n.
pub type Pages = u64;

/// A scope of the explorer, the number of pages of each of its sequences, and their keys and bytes.
pub struct Kind {
    pub scope: Scope,
    pub pages: usize,
    keys: Vec<Vec<Vec<u8>>>,
    /// The bytes of each key's page.
    bytes: HashMap<Vec<u8>, Vec<u8>>,
}

impl Kind {
    fn new(scope: Scope, pages: usize) -> Self {
        let keys: Vec<_> = (0..SEQUENCES_PER_KIND).map(|name| sequence(name, pages)).collect();
        let page = |key: &Vec<u8>| (key.clone(), page(&scope, key));
        let bytes = keys.iter().flatten().map(page).collect();
        Self { scope, pages, keys, bytes }
    }

    pub fn page(&self, key: &[u8]) -> &[u8] {
        &self.bytes[key]
    }
}

fn page(scope: &Scope, key: &[u8]) -> Vec<u8> {
    let mut bytes = common::page(scope, key);
    let sum: usize = key.iter().map(|byte| usize::from(*byte)).sum();
    // Leave every third page random, so that no lossless codec shortens it.
    if scope.dtype == "bfloat16" && !sum.is_multiple_of(3) {
        for number in bytes.chunks_exact_mut(2) {
            // The magnitudes are at least 2^-7 and below 2.
            number[1] = (number[1] & 0x80) | 0x3c | (number[1] & 3);
        }
    }
    bytes
}

/// Sets whether the large pages of this thread's next history are so long that the store splits
/// them.
pub fn set_split_pages(split: bool) {
    HAS_SPLIT_PAGES.set(split);
}

/// Returns four scopes: small pages in long runs, unchained pages of two units, large pages, and
/// pages of numbers.
pub fn kinds() -> &'static [Kind; KINDS] {
    static WHOLE: OnceLock<[Kind; KINDS]> = OnceLock::new();
    static SPLIT: OnceLock<[Kind; KINDS]> = OnceLock::new();
    if HAS_SPLIT_PAGES.get() {
        SPLIT.get_or_init(|| new_kinds(SPLIT_PAGE, 2))
    } else {
        WHOLE.get_or_init(|| new_kinds(70_000, 5))
    }
}

/// Returns the scopes, with sequences of `pages` large pages of `page_bytes`.
fn new_kinds(page_bytes: u64, pages: usize) -> [Kind; KINDS] {
    let numbers = Scope {
        dtype: "bfloat16".to_owned(),
        page_tokens: 16,
        layers: (0, 3),
        kv_heads: (0, 1),
        head_dim: 64,
        layout: "page_first".to_owned(),
        page_bytes: None,
        ..Scope::opaque("numbers", 1, true)
    };
    [
        Kind::new(Scope::opaque("small", 300, true), 40),
        Kind::new(Scope::opaque("alone", 5000, false), 24),
        Kind::new(Scope::opaque("large", page_bytes, true), pages),
        Kind::new(numbers, 12),
    ]
}

pub fn keys_of(at: usize) -> (&'static Kind, &'static [Vec<u8>]) {
    let kind = &kinds()[at / SEQUENCES_PER_KIND as usize];
    (kind, &kind.keys[at % SEQUENCES_PER_KIND as usize])
}

/// Returns the set of the first `count` pages of a sequence.
pub const fn leading(count: usize) -> Pages {
    (1 << count) - 1
}

/// Returns the pages of sequence `at` that remain after a delete of `page`. In a chained scope a
/// delete removes the pages after it as well.
pub fn left_by_delete(at: usize, page: usize) -> Pages {
    if keys_of(at).0.scope.chained { leading(page) } else { !(1 << page) }
}

/// Returns the pages of every sequence that are in the store.
pub fn present_pages(store: &Store) -> Vec<Pages> {
    (0..SEQUENCES)
        .map(|at| {
            let (kind, keys) = keys_of(at);
            let present = store.exists(&kind.scope, &refs(keys)).unwrap();
            present.iter().rev().fold(0, |pages, present| pages << 1 | u64::from(*present))
        })
        .collect()
}

/// Checks that a probe of the whole sequence ends at its first page that is not in `present`.
pub fn check_probe(store: &Store, at: usize, present: Pages) {
    let (kind, keys) = keys_of(at);
    let probed = store.probe(&kind.scope, &refs(keys)).unwrap();
    assert_eq!(
        probed,
        present.trailing_ones() as usize,
        "a probe must end at the first missing page of sequence {at}: {present:b} are present"
    );
}

/// Puts the first `count` pages of a sequence, retained until `retain_until`, in seconds since
/// 1970.
pub fn put(store: &Store, at: usize, count: usize, retain_until: u64) -> Result<Outcome> {
    let (kind, keys) = keys_of(at);
    let pages: Vec<&[u8]> = keys[..count].iter().map(|key| kind.page(key)).collect();
    let (source, control) = (BorrowedPages::new(&pages), Control::default());
    let options = PutOptions { retain_until, ..PutOptions::default() };
    store.put_batch(&kind.scope, &refs(&keys[..count]), &source, &options, &control)
}

/// Gets pages, and checks that `get` delivers every page of `pages` with its correct bytes.
pub fn check_get(store: &Store, at: usize, pages: Pages) {
    let (kind, keys) = keys_of(at);
    let mut from = 0;
    while from < keys.len() {
        let run = (pages >> from).trailing_ones() as usize;
        if run == 0 {
            from += 1;
            continue;
        }
        let outcome = get(store, kind, &keys[from..from + run]);
        assert_eq!(outcome.pages, run, "sequence {at}, from page {from}: {}", outcome.reason);
        from += run;
    }
}

fn get(store: &Store, kind: &Kind, keys: &[Vec<u8>]) -> Outcome {
    let bytes = kind.scope.resolved_page_bytes().unwrap() as usize;
    let mut pages = vec![vec![0xEE; bytes]; keys.len()];
    let mut slices: Vec<&mut [u8]> = pages.iter_mut().map(Vec::as_mut_slice).collect();
    let target = BorrowedPagesMut::new(&mut slices);
    let outcome = store.get_batch(&kind.scope, &refs(keys), &target, &Control::default()).unwrap();
    drop(target);
    for ((key, got), _) in keys.iter().zip(&pages).zip(&outcome.ok).filter(|(_, ok)| **ok) {
        assert!(*got == kind.page(key), "WRONG BYTES");
    }
    outcome
}
