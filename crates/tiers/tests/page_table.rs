//! The page table against a model that keeps a map of single pages.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use proptest::prelude::*;
use ritornello_format::PageHash;
use ritornello_tiers::{PageTable, Residence, Tier};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Returns the page hashes of a prompt that begins with the first `fork` pages of prompt 0. Prompts
/// with the same fork differ by `number`.
fn prompt(number: usize, fork: usize, pages: usize) -> Vec<PageHash> {
    let page = |at: usize| {
        let own = if at < fork { 0 } else { number as u64 };
        let mut hash = [0xee; 16];
        let mixed = ((own << 32) | (at as u64 + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hash[..8].copy_from_slice(&mixed.to_le_bytes());
        PageHash(hash)
    };
    (0..pages).map(page).collect()
}

/// Returns prompts with common beginnings: some fit into one node of the page table, and some are
/// longer.
fn prompts() -> Vec<Vec<PageHash>> {
    let forks = [(0, 0, 40), (1, 7, 30), (2, 7, 12), (3, 20, 700), (4, 39, 90), (5, 0, 1100)];
    forks.into_iter().map(|(number, fork, pages)| prompt(number, fork, pages)).collect()
}

/// A step of the test. `Claim`, `Lock` and `Forget` hold the index of a prompt and the two ends of
/// a range of its pages, `Walk` the index of a prompt and a number of its leading pages, `Evict`
/// the number of pages to evict. `MarkPresent` ends a claim: if its flag is false, the transfer
/// failed, and the claim is abandoned. `Unlock` ends a lock. The number of `MarkPresent` and
/// `Unlock` selects the claim or lock: it is the index in the model's list, modulo the length of
/// the list.
#[derive(Clone, Copy, Debug)]
enum Step {
    Claim(Tier, usize, usize, usize),
    MarkPresent(usize, bool),
    Lock(Tier, usize, usize, usize),
    Unlock(usize),
    Evict(Tier, usize),
    Forget(Tier, usize, usize, usize),
    Walk(usize, usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let tier = prop_oneof![Just(Tier::Host), Just(Tier::Disk)];
    let place = || (0..6_usize, 0..1100_usize, 0..1100_usize);
    let step = prop_oneof![
        4 => (tier.clone(), place()).prop_map(|(t, (p, a, b))| Step::Claim(t, p, a, b)),
        4 => (0..64_usize, any::<bool>()).prop_map(|(n, arrived)| Step::MarkPresent(n, arrived)),
        2 => (tier.clone(), place()).prop_map(|(t, (p, a, b))| Step::Lock(t, p, a, b)),
        2 => (0..64_usize).prop_map(Step::Unlock),
        2 => (tier.clone(), 1..600_usize).prop_map(|(t, n)| Step::Evict(t, n)),
        1 => (tier, place()).prop_map(|(t, (p, a, b))| Step::Forget(t, p, a, b)),
        3 => (0..6_usize, 0..1100_usize).prop_map(|(p, n)| Step::Walk(p, n)),
    ];
    prop::collection::vec(step, 1..60)
}

#[derive(Clone, Copy, Debug, Default)]
struct Page {
    residences: [Residence; 4],
    locks: [u32; 4],
    slot: Option<u32>,
}

/// The model: a map of single pages, the claims, and the locks in progress.
#[derive(Default)]
struct Model {
    pages: HashMap<PageHash, Page>,
    slots: u32,
    claims: Vec<(Tier, usize, std::ops::Range<usize>)>,
    locks: Vec<(Tier, usize, std::ops::Range<usize>)>,
}

impl Model {
    fn page(&mut self, hash: PageHash) -> &mut Page {
        self.pages.entry(hash).or_default()
    }

    fn clip(pages: &[PageHash], a: usize, b: usize) -> std::ops::Range<usize> {
        let (a, b) = (a.min(b) % pages.len(), a.max(b).min(pages.len()));
        a..b.max(a)
    }

    fn step(&mut self, table: &PageTable, prompts: &[Vec<PageHash>], step: Step) {
        match step {
            Step::Claim(tier, number, a, b) => {
                let pages = &prompts[number];
                let range = Self::clip(pages, a, b);
                let claimed = table.claim(tier, Residence::Loading, pages, range.clone());
                let claimed_pages: Vec<usize> = claimed.iter().cloned().flatten().collect();
                let absent = |at: &usize| {
                    let known = self.pages.get(&pages[*at]).copied().unwrap_or_default();
                    known.residences[tier as usize] == Residence::None
                };
                assert_eq!(claimed_pages, range.filter(absent).collect::<Vec<_>>());
                for &at in &claimed_pages {
                    self.page(pages[at]).residences[tier as usize] = Residence::Loading;
                }
                self.claims.extend(claimed.into_iter().map(|range| (tier, number, range)));
            }
            Step::MarkPresent(which, arrived) => {
                if self.claims.is_empty() {
                    return;
                }
                let (tier, number, range) = self.claims.swap_remove(which % self.claims.len());
                let pages = &prompts[number];
                if !arrived {
                    table.abandon(tier, pages, range.clone());
                    for at in range {
                        self.page(pages[at]).residences[tier as usize] = Residence::None;
                    }
                    return;
                }
                let mut slots = Vec::new();
                for at in range.clone() {
                    self.slots += 1;
                    let slot = self.slots;
                    let page = self.page(pages[at]);
                    page.residences[tier as usize] = Residence::Present;
                    if tier == Tier::Host {
                        page.slot = Some(slot);
                        slots.push(slot);
                    }
                }
                assert_eq!(table.mark_present(tier, pages, range, &slots), []);
            }
            Step::Lock(tier, number, a, b) => {
                let pages = &prompts[number];
                let range = Self::clip(pages, a, b);
                let (count, slots) = table.lock(tier, pages, range.clone());
                let present = |at: &usize| {
                    self.pages
                        .get(&pages[*at])
                        .is_some_and(|p| p.residences[tier as usize] == Residence::Present)
                };
                let expected = range.clone().take_while(present).count();
                assert_eq!(count, expected);
                let locked = range.start..range.start + count;
                let mine: Vec<u32> =
                    locked.clone().filter_map(|at| self.pages[&pages[at]].slot).collect();
                if tier == Tier::Host {
                    assert_eq!(slots, mine);
                }
                for at in locked.clone() {
                    self.page(pages[at]).locks[tier as usize] += 1;
                }
                if count > 0 {
                    self.locks.push((tier, number, locked));
                }
            }
            Step::Unlock(which) => {
                if self.locks.is_empty() {
                    return;
                }
                let (tier, number, range) = self.locks.swap_remove(which % self.locks.len());
                table.unlock(tier, &prompts[number], range.clone());
                for at in range {
                    self.page(prompts[number][at]).locks[tier as usize] -= 1;
                }
            }
            Step::Evict(tier, requested) => self.evict(table, prompts, tier, requested),
            Step::Forget(tier, number, a, b) => {
                let pages = &prompts[number];
                let range = Self::clip(pages, a, b);
                let freed = table.forget(tier, pages, range.clone());
                let mut expected = Vec::new();
                for at in range {
                    let Some(page) = self.pages.get_mut(&pages[at]) else { continue };
                    if page.residences[tier as usize] == Residence::Present
                        && page.locks[tier as usize] == 0
                    {
                        page.residences[tier as usize] = Residence::None;
                        if tier == Tier::Host {
                            expected.extend(page.slot.take());
                        }
                    }
                }
                assert_eq!(freed, expected);
            }
            Step::Walk(number, length) => {
                let pages = &prompts[number][..length.min(prompts[number].len())];
                let spans = table.walk(&pages);
                let mut at = 0;
                for span in &spans {
                    assert_eq!(span.at, at);
                    for page in &pages[at..at + span.pages] {
                        assert_eq!(self.pages[page].residences, span.residences);
                    }
                    at += span.pages;
                }
                for pair in spans.windows(2) {
                    assert_ne!(
                        pair[0].residences, pair[1].residences,
                        "neighbouring spans must differ in a residence"
                    );
                }
                let next = pages.get(at).and_then(|page| self.pages.get(page)).copied();
                assert_eq!(
                    next.unwrap_or_default().residences,
                    [Residence::None; 4],
                    "the walk must end before a page on no tier"
                );
            }
        }
    }

    /// Checks that the table evicts no locked page, and no page that precedes a page that stays on
    /// the tier.
    fn evict(
        &mut self,
        table: &PageTable,
        prompts: &[Vec<PageHash>],
        tier: Tier,
        requested: usize,
    ) {
        let kind = tier as usize;
        let victims = table.evict(tier, requested);
        let mut evicted = HashSet::new();
        for victim in &victims {
            for (at, hash) in victim.pages.iter().enumerate() {
                let page = self.page(*hash);
                assert_eq!((page.residences[kind], page.locks[kind]), (Residence::Present, 0));
                page.residences[kind] = Residence::None;
                if tier == Tier::Host {
                    assert_eq!(page.slot.take(), Some(victim.slots[at]));
                }
                evicted.insert(*hash);
            }
        }
        let is_present = |model: &Self, hash: &PageHash| {
            model.pages.get(hash).is_some_and(|page| page.residences[kind] != Residence::None)
        };
        for pages in prompts {
            for pair in pages.windows(2).filter(|pair| evicted.contains(&pair[0])) {
                assert!(!is_present(self, &pair[1]), "a page was evicted before the page after it");
            }
        }
        if evicted.len() < requested {
            // If fewer pages were evicted than requested, each remaining page is locked or in
            // transfer, or precedes such a page.
            let mut kept: HashSet<PageHash> = HashSet::new();
            for pages in prompts {
                let keeps = |hash: &PageHash| {
                    self.pages.get(hash).is_some_and(|page| {
                        page.locks[kind] > 0
                            || matches!(
                                page.residences[kind],
                                Residence::Loading | Residence::Storing
                            )
                    })
                };
                if let Some(last) = pages.iter().rposition(keeps) {
                    kept.extend(&pages[..=last]);
                }
            }
            for (hash, page) in &self.pages {
                assert!(page.residences[kind] != Residence::Present || kept.contains(hash));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn table_agrees_with_model(steps in steps()) {
        let (table, prompts, mut model) = (PageTable::new(), prompts(), Model::default());
        for step in steps {
            model.step(&table, &prompts, step);
            table.check();
        }
        for (tier, number, range) in std::mem::take(&mut model.claims) {
            table.abandon(tier, &prompts[number], range);
        }
        for (tier, number, range) in std::mem::take(&mut model.locks) {
            table.unlock(tier, &prompts[number], range);
        }
        for tier in [Tier::Host, Tier::Disk] {
            let _ = table.evict(tier, usize::MAX);
        }
        prop_assert_eq!(table.stats().nodes, 0, "the table must keep no page that is on no tier");
        prop_assert_eq!(table.stats().pages, 0);
    }
}

#[test]
fn eviction_takes_oldest_ends_first() {
    let table = PageTable::new();
    let prompts = [prompt(1, 0, 10), prompt(2, 0, 10), prompt(3, 0, 10)];
    for (number, pages) in prompts.iter().enumerate() {
        assert_eq!(table.claim(Tier::Host, Residence::Storing, pages, 0..10), vec![0..10]);
        let slots: Vec<u32> = (0..10).map(|at| number as u32 * 10 + at).collect();
        assert_eq!(table.mark_present(Tier::Host, pages, 0..10, &slots), []);
        table.walk(pages);
    }
    table.walk(&prompts[0]);
    let victims = table.evict(Tier::Host, 4);
    assert_eq!(victims.len(), 1);
    assert_eq!(victims[0].pages, prompts[1][6..]);
    assert_eq!(victims[0].slots, [16, 17, 18, 19]);
    let order: BTreeMap<u32, u32> =
        table.evict(Tier::Host, 26).iter().flat_map(|v| v.slots.clone()).zip(0..).collect();
    assert!(order[&10] < order[&20] && order[&20] < order[&0]);
    assert_eq!(table.stats().nodes, 0);
}

#[test]
fn concurrent_threads_keep_table_consistent() {
    let table = PageTable::new();
    let prompts = prompts();
    std::thread::scope(|scope| {
        for seed in 0..4_usize {
            let (table, prompts) = (&table, &prompts);
            scope.spawn(move || {
                for turn in 0..300_usize {
                    let pages = &prompts[(seed + turn * 7) % prompts.len()];
                    let from = turn * 31 % pages.len();
                    for claimed in
                        table.claim(Tier::Host, Residence::Loading, pages, from..pages.len())
                    {
                        let slots: Vec<u32> = claimed.clone().map(|at| at as u32).collect();
                        assert_eq!(table.mark_present(Tier::Host, pages, claimed, &slots), []);
                    }
                    let (locked, slots) = table.lock(Tier::Host, pages, 0..pages.len());
                    assert_eq!(slots, (0..locked as u32).collect::<Vec<_>>());
                    let _ = table.evict(Tier::Host, 100);
                    table.unlock(Tier::Host, pages, 0..locked);
                    table.walk(pages);
                }
            });
        }
    });
    table.check();
    let _ = table.evict(Tier::Host, usize::MAX);
    assert_eq!(table.stats().nodes, 0);
}
