//! A suite of the guarantees of every [`Residency`].
//! `conformance::run_residency(&|| Box::new(MyResidency::new()))` panics at the first guarantee that
//! is broken.

use super::pages;
use crate::residency::{Holder, Prefix, Residency, Tier, Tiers, Worker};
use ritornello_format::{ErrorKind, PageHash, Result, ScopeSlot};
use std::sync::atomic::{AtomicBool, Ordering};

/// Creates an empty residency index.
type Make<'a> = &'a dyn Fn() -> Box<dyn Residency>;

const SCOPE: ScopeSlot = ScopeSlot(1);
const A: Worker = Worker(3);
const B: Worker = Worker(1 << 20);

/// Runs every scenario on a new index.
///
/// # Panics
/// If a guarantee is broken.
pub fn run_residency(make: Make<'_>) {
    prefix_of_each_worker_ends_at_its_first_missing_page(make().as_ref());
    hole_ends_a_prefix_and_keeps_later_pages(make().as_ref());
    repeated_and_ineffective_events_change_nothing(make().as_ref());
    cleared_pages_may_be_put_again(make().as_ref());
    hashes_that_share_bytes_are_distinguished(make().as_ref());
    short_and_long_sequences_are_found(make().as_ref());
    chain_may_arrive_page_by_page(make().as_ref());
    concurrent_readers_see_pages_that_are_not_removed(make().as_ref());
}

fn done(result: Result<()>) {
    assert_eq!(result.map_err(|error| error.to_string()), Ok(()));
}

fn put(index: &dyn Residency, worker: Worker, tier: Tier, pages: &[PageHash]) {
    done(index.put(SCOPE, worker, tier, None, pages));
}

/// Returns for each worker the length of its prefix, and the numbers of its pages by the fastest
/// tier that holds them.
fn prefixes(index: &dyn Residency, pages: &[PageHash]) -> Vec<(Worker, u32, [u32; 4])> {
    let prefixes = index.prefixes(SCOPE, &pages);
    prefixes.iter().map(|Prefix { worker, pages, on }| (*worker, *pages, *on)).collect()
}

fn holder(worker: Worker, tiers: impl Into<Tiers>) -> Holder {
    Holder { worker, tiers: tiers.into() }
}

fn prefix_of_each_worker_ends_at_its_first_missing_page(index: &dyn Residency) {
    let chain = pages(1, 10);
    assert_eq!(prefixes(index, &chain), [], "there are no holders yet");
    put(index, A, Tier::Device, &chain[..6]);
    put(index, B, Tier::Host, &chain[..4]);
    put(index, B, Tier::Device, &chain[..1]);
    put(index, B, Tier::Disk, &chain[3..9]);
    let expected = [(B, 9, [1, 3, 5, 0]), (A, 6, [6, 0, 0, 0])];
    assert_eq!(
        prefixes(index, &chain),
        expected,
        "the longest prefix is first; each page counts for its fastest tier"
    );
    assert_eq!(prefixes(index, &chain[..2]), [(A, 2, [2, 0, 0, 0]), (B, 2, [1, 1, 0, 0])]);
    assert_eq!(
        prefixes(index, &chain[6..]),
        [(B, 3, [0, 0, 3, 0])],
        "a prefix may start at any page"
    );
    assert_eq!(prefixes(index, &[]), [], "an empty list of pages has no prefixes");
    let both = Tiers::from(Tier::Host).with(Tier::Disk.into());
    let expected = [holder(A, Tier::Device), holder(B, both)];
    assert_eq!(
        index.holders(SCOPE, chain[3]),
        expected,
        "each worker is one holder, with all tiers on which it holds the page"
    );
    assert_eq!(index.holders(SCOPE, chain[9]), []);
    let branch = [&chain[..5], &pages(2, 3)[..]].concat();
    assert_eq!(
        prefixes(index, &branch)[0].1,
        5,
        "a branch matches up to the page at which it leaves the chain"
    );
}

fn hole_ends_a_prefix_and_keeps_later_pages(index: &dyn Residency) {
    let chain = pages(1, 8);
    put(index, A, Tier::Device, &chain);
    put(index, B, Tier::Device, &chain);
    index.remove_block(SCOPE, A, chain[3]);
    assert_eq!(prefixes(index, &chain), [(B, 8, [8, 0, 0, 0]), (A, 3, [3, 0, 0, 0])]);
    assert_eq!(prefixes(index, &chain[4..])[0], (A, 4, [4, 0, 0, 0]), "pages after the hole stay");
    index.remove_block(SCOPE, B, chain[3]);
    assert_eq!(index.holders(SCOPE, chain[3]), [], "the page has no holder");
    assert_eq!(prefixes(index, &chain)[1].1, 3);
    done(index.put(SCOPE, A, Tier::Host, Some(chain[2]), &chain[3..4]));
    assert_eq!(
        prefixes(index, &chain),
        [(A, 8, [7, 1, 0, 0]), (B, 3, [3, 0, 0, 0])],
        "a put fills the hole"
    );
    index.remove_blocks(SCOPE, A, Tier::Host.into(), &chain);
    assert_eq!(
        prefixes(index, &chain)[0].1,
        3,
        "a removal from one tier removes the page that only this tier had"
    );
    assert_eq!(prefixes(index, &chain[4..])[0].1, 4, "other tiers keep their pages");
}

fn repeated_and_ineffective_events_change_nothing(index: &dyn Residency) {
    let chain = pages(1, 6);
    index.remove_block(SCOPE, A, chain[0]);
    index.clear_worker(A);
    index.clear_scope(SCOPE);
    assert_eq!(prefixes(index, &chain), [], "removals from an empty index change nothing");
    let unknown = Some(pages(9, 1)[0]);
    let stored = |parent, pages: &[PageHash]| {
        done(index.put(SCOPE, A, Tier::Device, parent, pages));
    };
    stored(Some(chain[2]), &chain[3..]);
    stored(unknown, &chain[..2]);
    stored(None, &[]);
    assert_eq!(prefixes(index, &chain)[0].1, 2);
    stored(Some(chain[1]), &chain[2..3]);
    for _ in 0..2 {
        stored(None, &chain[1..5]);
        assert_eq!(
            prefixes(index, &chain),
            [(A, 6, [6, 0, 0, 0])],
            "a repeated event changes nothing"
        );
    }
    for _ in 0..2 {
        index.remove_blocks(SCOPE, A, Tiers::ALL, &[chain[5], chain[5], pages(9, 1)[0]]);
        assert_eq!(prefixes(index, &chain)[0].1, 5);
    }
    index.remove_blocks(SCOPE, A, Tier::Disk.into(), &chain);
    index.remove_blocks(SCOPE, A, Tiers::NONE, &chain);
    index.remove_block(SCOPE, B, chain[0]);
    index.remove_block(ScopeSlot(2), A, chain[0]);
    assert_eq!(prefixes(index, &chain)[0].1, 5, "removals that name no holder change nothing");
    let refused = index.put(SCOPE, A, Tier::Device, None, &[chain[0], PageHash::NONE]);
    assert_eq!(refused.map_err(|error| error.kind()), Err(ErrorKind::Invalid));
    index.remove_blocks(SCOPE, A, Tiers::ALL, &[chain[0], PageHash::NONE]);
    assert_eq!(prefixes(index, &chain)[0].1, 5, "a removal with PageHash::NONE changes nothing");
    assert_eq!(prefixes(index, &[chain[0], PageHash::NONE])[0].1, 1);
}

fn cleared_pages_may_be_put_again(index: &dyn Residency) {
    let (chain, other) = (pages(1, 40), ScopeSlot(7));
    let fill = || {
        for worker in [A, B] {
            put(index, worker, Tier::Device, &chain);
            put(index, worker, Tier::Host, &chain[..9]);
            done(index.put(other, worker, Tier::Disk, None, &chain));
        }
    };
    for round in 0..3 {
        fill();
        index.clear_worker(A);
        assert_eq!(prefixes(index, &chain), [(B, 40, [40, 0, 0, 0])], "round {round}");
        assert_eq!(
            index.prefixes(other, &&chain[..]).len(),
            1,
            "a cleared worker is removed from every scope"
        );
        put(index, A, Tier::Remote, &chain[..5]);
        let expected =
            [holder(A, Tier::Remote), holder(B, Tiers::from(Tier::Device).with(Tier::Host.into()))];
        assert_eq!(
            index.holders(SCOPE, chain[2]),
            expected,
            "the worker may be added again under its number"
        );
        index.clear_scope(SCOPE);
        assert_eq!(prefixes(index, &chain), []);
        assert_eq!(
            index.prefixes(other, &&chain[..])[0].pages,
            40,
            "other scopes keep their holders"
        );
        put(index, B, Tier::Host, &chain[..2]);
        assert_eq!(
            prefixes(index, &chain),
            [(B, 2, [0, 2, 0, 0])],
            "a cleared scope may be filled again"
        );
        index.clear_worker(B);
        assert_eq!(index.prefixes(other, &&chain[..]), []);
        done(index.maintain());
        assert_eq!(prefixes(index, &chain), [], "a cleared scope stays empty");
    }
}

fn hashes_that_share_bytes_are_distinguished(index: &dyn Residency) {
    // The hashes differ only in eight bytes, which begin at byte `at`.
    let alike = |at: usize, number: u64| {
        let mut hash = PageHash([0x5a; 16]);
        hash.0[at..at + 8].copy_from_slice(&number.to_le_bytes());
        hash
    };
    for at in [0, 4, 8] {
        let chain: Vec<PageHash> = (0..3000).map(|number| alike(at, number)).collect();
        put(index, A, Tier::Device, &chain);
        index.remove_blocks(SCOPE, A, Tiers::ALL, &chain[1000..1001]);
        assert_eq!(prefixes(index, &chain)[0].1, 1000, "each hash is a separate page");
        assert_eq!(prefixes(index, &chain[1001..])[0].1, 1999);
        assert_eq!(index.holders(SCOPE, alike(at, 3000)), []);
        index.clear_scope(SCOPE);
    }
}

fn short_and_long_sequences_are_found(index: &dyn Residency) {
    let (one, many) = (pages(1, 1), pages(2, 100_000));
    put(index, A, Tier::Device, &one);
    put(index, A, Tier::Disk, &many);
    put(index, B, Tier::Disk, &many[..70_001]);
    assert_eq!(prefixes(index, &one), [(A, 1, [1, 0, 0, 0])]);
    assert_eq!(
        prefixes(index, &many),
        [(A, 100_000, [0, 0, 100_000, 0]), (B, 70_001, [0, 0, 70_001, 0])]
    );
    index.remove_blocks(SCOPE, A, Tiers::ALL, &many);
    assert_eq!(prefixes(index, &many), [(B, 70_001, [0, 0, 70_001, 0])]);
    index.remove_blocks(SCOPE, B, Tiers::ALL, &many);
    assert_eq!(prefixes(index, &many), []);
}

fn chain_may_arrive_page_by_page(index: &dyn Residency) {
    let chain = pages(1, 1500);
    for (at, page) in chain.iter().enumerate() {
        let parent = at.checked_sub(1).map(|before| chain[before]);
        done(index.put(SCOPE, A, Tier::Device, parent, &[*page]));
    }
    assert_eq!(prefixes(index, &chain)[0].1, 1500);
    // Remove pages 1,200 and later in reverse order, as an engine evicts, then every third page.
    for page in chain[1200..].iter().rev().chain(chain.iter().step_by(3)) {
        index.remove_block(SCOPE, A, *page);
    }
    for (at, page) in chain.iter().enumerate() {
        let held = !index.holders(SCOPE, *page).is_empty();
        assert_eq!(held, at < 1200 && at % 3 != 0, "page {at}");
    }
    put(index, A, Tier::Device, &chain);
    assert_eq!(prefixes(index, &chain)[0].1, 1500);
}

fn concurrent_readers_see_pages_that_are_not_removed(index: &dyn Residency) {
    let chain = pages(1, 300);
    put(index, A, Tier::Device, &chain);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut reads = 0;
                    while !stop.load(Ordering::Relaxed) || reads == 0 {
                        let prefixes = prefixes(index, &chain);
                        let a = prefixes.iter().find(|(worker, ..)| *worker == A);
                        assert_eq!(a, Some(&(A, 300, [300, 0, 0, 0])), "A keeps all its pages");
                        let b = prefixes.iter().find(|(worker, ..)| *worker == B);
                        assert!(b.is_none_or(|(_, pages, on)| on.iter().sum::<u32>() == *pages));
                        reads += 1;
                    }
                })
            })
            .collect();
        for round in 0..60 {
            put(index, B, Tier::Host, &chain[..10 + round * 4]);
            match round % 3 {
                0 => index.clear_worker(B),
                1 => index.remove_blocks(SCOPE, B, Tiers::ALL, &chain[5..]),
                _ => index.clear_scope(ScopeSlot(2)),
            }
        }
        stop.store(true, Ordering::Relaxed);
        for reader in readers {
            if let Err(panic) = reader.join() {
                std::panic::resume_unwind(panic);
            }
        }
    });
}
