//! Evicts the pages with the least expected hits for the space and time they take.

use super::eviction_policy::{Arrival, EvictionPolicy};
use super::ghost::Ghosts;
use super::pieces::{List, Piece, Pieces};

/// Learns, for each kind of page, the distribution of the time between two uses, and evicts the
/// pages with the fewest expected hits per unit of time.
///
/// The worth of a page of age `a` is the best rate of hits that waiting for its use can bring: the
/// maximum over `t` of P(used within `t`) / E(time until the use, at most `t`), where P and E are
/// conditional on no use up to age `a`. The policy therefore keeps a part of the pages that recur
/// at long intervals, and evicts pages past their expected time of use.
///
/// The policy follows Beckmann, Chen and Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit
/// Density", NSDI '18, with two changes. In LHD the time that a page takes ends with its use or
/// its eviction; here `t` is chosen freely, like the stopping time of Gittins' index ("Bandit
/// Processes and Dynamic Allocation Indices", 1979). And keys of evicted pages are remembered: a
/// put of such a page counts as a use that the eviction prevented.
///
/// Age is counted in steps; a step is the use or put of a sixteenth of the capacity. Pages of one
/// kind and age are in a list by last use.
#[derive(Debug)]
pub(super) struct Density {
    kinds: [Kind; KINDS],
    ghosts: Ghosts,
    capacity: u64,
    /// Number of keys given to [`EvictionPolicy::set_capacity`]. The policy remembers at most
    /// [`REMEMBERED`] times this number of keys, or 64 keys if that is more.
    keys: usize,
    /// The current step, and the units put or used in this step.
    now: u32,
    used: u64,
    /// Steps until worths are recomputed.
    due: u32,
    /// Units of the pieces that the previous policy handed over so far. Pieces come warmest first,
    /// so this sum estimates how many units were put or used since the next piece was last used.
    inherited: u64,
    /// The list to evict from first: its kind, its index in [`Kind::ages`] ([`AGES`] for
    /// [`Kind::old`]), and its worth. `None` after each step and each computation of worths: the
    /// next eviction searches for the list.
    next: Option<(usize, usize, f32)>,
}

/// Number of distinguished ages, in steps. The last age stands for all higher ages.
const AGES: usize = 128;
/// A step ends when 1/`STEPS` of the store's capacity was put or used.
const STEPS: u64 = 16;
/// Steps between recomputations of worths.
const REVIEW: u32 = 4;
/// Factor by which the counts of a [`Kind`] decay at each computation of worths.
const FADE: f32 = 0.985;
/// Kinds of pages: put and not used since; the same, but put as the first continuation of used
/// pages; used once; used more often; and put again soon after an eviction.
const KINDS: usize = 5;
const RETURNED: usize = 4;
/// Number of low bits, in the note kept with an evicted key, that hold the page's kind. The other
/// bits hold the step of its last use.
const KIND_BITS: u32 = 3;
/// For each kind, the prior probability of use in a step is this number divided by (4 + age): if
/// the time scale is unknown, the probability of reuse falls as 1/age.
const PRIORS: [f32; KINDS] = [0.05, 0.2, 0.8, 0.8, 0.8];
/// Weight of the prior, as a fraction of the capacity. The weight is high because all pages of a
/// sequence are used together, so that the uses of a sequence's pages are one observation.
const EXPECTED: f32 = 0.4;
/// Maximum units of evicted pages whose keys are remembered, as a multiple of the capacity; and
/// maximum number of these keys, as a multiple of [`Density::keys`].
const REMEMBERED: u64 = 2;

#[derive(Debug)]
struct Kind {
    /// Pieces by step of last use, modulo [`AGES`].
    ages: Box<[List; AGES]>,
    /// One bit for each list in `ages`. A list whose bit is unset is empty.
    filled: u128,
    /// Pieces older than all pieces in `ages`.
    old: List,
    /// Units that entered this kind, in total (`began`) and by step modulo [`AGES`] (`begins`), and
    /// units that were used again, by age (`used`). These counts decay.
    began: f32,
    begins: Box<[f32; AGES]>,
    used: Box<[f32; AGES]>,
    worth: Box<[f32; AGES]>,
}

impl Kind {
    fn new() -> Self {
        Self {
            ages: Box::new([List::new(); AGES]),
            filled: 0,
            old: List::new(),
            began: 0.0,
            begins: Box::new([0.0; AGES]),
            used: Box::new([0.0; AGES]),
            worth: Box::new([0.0; AGES]),
        }
    }

    /// Returns the oldest piece of the list with index `at` in `ages`; of the list `old` if `at` is
    /// [`AGES`].
    fn oldest(&self, at: usize) -> Option<u32> {
        self.ages.get(at).unwrap_or(&self.old).oldest()
    }

    /// Returns the list of pieces last used at `stamp`, and sets the bit of `stamp` in `filled`,
    /// because the caller inserts a piece. If the list is `old`, which has no bit, the bit belongs
    /// to another list, which may be empty.
    fn filling(&mut self, now: u32, stamp: u32) -> &mut List {
        self.filled |= 1 << (stamp as usize % AGES);
        self.list(now, stamp)
    }

    /// Returns the ages that may have pieces as bits. The bit of the oldest age is always set.
    fn ages_filled(&self, now: u32) -> u128 {
        // Pieces of age `a` are in the list with index `(now - a) % AGES`.
        let ages = self.filled.reverse_bits().rotate_left((now + 1) % AGES as u32);
        ages | 1 << (AGES - 1)
    }

    /// The list of pieces last used at `stamp`.
    fn list(&mut self, now: u32, stamp: u32) -> &mut List {
        match now.wrapping_sub(stamp) < AGES as u32 - 1 {
            true => &mut self.ages[stamp as usize % AGES],
            false => &mut self.old,
        }
    }

    /// Computes the worth by age from the observations and from the prior, which weighs as much as
    /// `expected` units; then lets the observations decay.
    fn review(&mut self, now: u32, prior: f32, expected: f32) {
        // Estimate the chance of use at each age as Kaplan and Meier do: units that entered the
        // kind count for the ages that they have reached.
        let mut hazards = [0.0; AGES];
        let (mut reached, mut left) = (self.began, 1.0);
        for (age, hazard) in hazards.iter_mut().enumerate().take(AGES - 1) {
            // Count half of the units that entered the kind `age` steps ago: on average they
            // entered in the middle of that step.
            let half = self.begins[(now as usize - age) % AGES] / 2.0;
            let believed = expected * prior / (4 + age) as f32;
            let waited = (reached - half).max(0.0) * left;
            *hazard = ((self.used[age] + believed) / (waited + expected)).min(1.0);
            reached -= 2.0 * half;
            left *= 1.0 - *hazard;
        }
        assess(&hazards, &mut self.worth);
        self.began *= FADE;
        let counts = self.used.iter_mut().chain(self.begins.iter_mut());
        counts.for_each(|count| *count *= FADE);
    }
}

/// An interval of ages, and three figures for a page that is unused when the interval begins: the
/// mean hits and the mean steps until a use or the end of the interval, and the probability that
/// the page is still unused at the end.
#[derive(Clone, Copy, Default)]
struct Wait {
    hits: f32,
    steps: f32,
    on: f32,
}

/// Computes, for every age, the best rate of uses per step that waiting can bring. `hazards[age]`
/// is the share of the pages unused before `age` that are used within the step of that age.
///
/// Iterates from the last step backwards. An interval is extended while the extension raises its
/// rate, so the intervals on the stack have falling rates (as in pooling adjacent violators), and
/// the work is linear.
fn assess(hazards: &[f32; AGES], worth: &mut [f32; AGES]) {
    let mut stack = [Wait::default(); AGES];
    let mut depth = 0;
    for (hazard, worth) in hazards.iter().zip(worth).rev() {
        // A page that is used within this step is used in the middle of it on average.
        let mut wait = Wait { hits: *hazard, steps: 1.0 - hazard / 2.0, on: 1.0 - hazard };
        while let Some(next) = stack[..depth].last()
            && next.hits * wait.steps > wait.hits * next.steps
        {
            wait.hits += wait.on * next.hits;
            wait.steps += wait.on * next.steps;
            wait.on *= next.on;
            depth -= 1;
        }
        stack[depth] = wait;
        depth += 1;
        *worth = wait.hits / wait.steps;
    }
}

impl Density {
    pub(super) fn new() -> Self {
        Self {
            kinds: std::array::from_fn(|_| Kind::new()),
            ghosts: Ghosts::default(),
            capacity: 0,
            keys: 0,
            now: 2 * AGES as u32,
            used: 0,
            due: REVIEW,
            inherited: 0,
            next: None,
        }
    }

    fn list(&mut self, piece: &Piece) -> &mut List {
        self.kinds[usize::from(piece.queue) % KINDS].list(self.now, piece.stamp)
    }

    /// Called before a piece of this kind and age is listed. Makes the piece's list the next to
    /// evict from if its worth is at most the worth of the list that is next at present.
    fn listing(&mut self, kind: usize, age: u32) {
        let age = (age as usize).min(AGES - 1);
        let worth = self.kinds[kind].worth[age];
        if self.next.is_some_and(|(.., least)| worth <= least) {
            let at = if age < AGES - 1 { (self.now as usize - age) % AGES } else { AGES };
            self.next = Some((kind, at, worth));
        }
    }

    /// Advances the policy's clock by `units` units that were put or used.
    fn pass(&mut self, pieces: &mut Pieces, units: u64) {
        if self.capacity == 0 {
            return;
        }
        self.used += units;
        let step = (self.capacity / STEPS).max(1);
        // Bound the loop to twice [`AGES`] steps. Further steps would move no piece: after [`AGES`]
        // steps all pieces are in the lists `old`.
        self.used = self.used.min(step * 2 * AGES as u64);
        while self.used >= step {
            self.used -= step;
            self.now += 1;
            self.next = None;
            for kind in &mut self.kinds {
                let leaving = &mut kind.ages[(self.now as usize + 1) % AGES];
                kind.old.append(pieces, leaving);
                kind.filled &= !(1 << ((self.now as usize + 1) % AGES));
                kind.begins[self.now as usize % AGES] = 0.0;
            }
            self.due -= 1;
            if self.due == 0 {
                self.due = REVIEW;
                self.review();
            }
        }
    }

    fn review(&mut self) {
        let expected = self.capacity as f32 * EXPECTED;
        for (kind, prior) in self.kinds.iter_mut().zip(PRIORS) {
            kind.review(self.now, prior, expected);
        }
        self.next = None;
    }

    /// Makes a piece that was just used or put the newest of a kind.
    fn begin(&mut self, pieces: &mut Pieces, slot: u32, kind: usize) {
        let units = pieces[slot].units();
        let piece = &mut pieces[slot];
        (piece.queue, piece.stamp) = (kind as u8, self.now);
        self.listing(kind, 0);
        let kind = &mut self.kinds[kind];
        kind.began += units as f32;
        kind.begins[self.now as usize % AGES] += units as f32;
        kind.filling(self.now, self.now).push_newest(pieces, slot);
    }
}

impl EvictionPolicy for Density {
    fn name(&self) -> &'static str {
        "density"
    }

    fn set_capacity(&mut self, units: u64, keys: usize) {
        self.keys = keys;
        let first = self.capacity == 0;
        self.capacity = units;
        if first {
            self.review();
        }
    }

    fn recall(&mut self, key: u64, units: u64) -> bool {
        let Some(note) = self.ghosts.recall(key) else { return false };
        let age = (self.now << KIND_BITS).wrapping_sub(note) >> KIND_BITS;
        self.kinds[note as usize % (1 << KIND_BITS) % KINDS].used[(age as usize).min(AGES - 1)] +=
            units as f32;
        true
    }

    fn insert(&mut self, pieces: &mut Pieces, slot: u32, arrival: Arrival) {
        match arrival {
            Arrival::New { known, continues } => {
                self.pass(pieces, pieces[slot].units());
                let kind = if known { RETURNED } else { usize::from(continues) };
                self.begin(pieces, slot, kind);
            }
            Arrival::Inherited => {
                let age = self.inherited * STEPS / self.capacity.max(1);
                let piece = &mut pieces[slot];
                self.inherited += piece.units();
                piece.queue = if piece.uses == 0 { 0 } else { 1 + piece.uses.min(2) };
                piece.stamp = self.now.wrapping_sub((age as u32).min(AGES as u32));
                self.relist(pieces, slot);
            }
        }
    }

    fn touch(&mut self, pieces: &mut Pieces, slot: u32) {
        let units = pieces[slot].units();
        let age = self.now.wrapping_sub(pieces[slot].stamp) as usize;
        let kind = usize::from(pieces[slot].queue) % KINDS;
        self.kinds[kind].used[age.min(AGES - 1)] += units as f32;
        self.unlink(pieces, slot);
        self.pass(pieces, units);
        self.begin(pieces, slot, 1 + usize::from(pieces[slot].uses.clamp(1, 2)));
    }

    fn unlink(&mut self, pieces: &mut Pieces, slot: u32) {
        self.list(&pieces[slot]).unlink(pieces, slot);
    }

    fn relist(&mut self, pieces: &mut Pieces, slot: u32) {
        let piece = &mut pieces[slot];
        // An earlier policy may have set the stamp by a clock that was ahead of this policy's
        // clock, if the tree has switched policies `POLICY_GENERATIONS` times since the piece was
        // last listed. For such a stamp, [`Kind::list`] would return `old` now, and a different
        // list after this policy's clock has reached the stamp, although the piece would still be
        // in `old`.
        if piece.stamp > self.now {
            piece.stamp = self.now - AGES as u32;
        }
        let age = self.now - piece.stamp;
        self.listing(usize::from(piece.queue) % KINDS, age);
        let Piece { queue, stamp, .. } = pieces[slot];
        let kind = &mut self.kinds[usize::from(queue) % KINDS];
        kind.filling(self.now, stamp).push_oldest(pieces, slot);
    }

    fn list_after(&mut self, pieces: &mut Pieces, listed: u32, slot: u32) {
        self.list(&pieces[slot]).push_after(pieces, listed, slot);
    }

    fn shrunk(&mut self, piece: &Piece, units: u64) {
        self.list(piece).shrunk(units);
    }

    fn victim(&mut self, _: &mut Pieces) -> Option<u32> {
        if let Some((kind, at, _)) = self.next
            && let Some(slot) = self.kinds[kind].oldest(at)
        {
            return Some(slot);
        }
        let mut least: Option<(usize, usize, f32)> = None;
        for (number, kind) in self.kinds.iter_mut().enumerate() {
            let mut ages = kind.ages_filled(self.now);
            while ages != 0 {
                let age = ages.trailing_zeros() as usize;
                ages &= ages - 1;
                let worth = kind.worth[age];
                if least.is_some_and(|(.., least)| worth > least) {
                    continue;
                }
                let at = if age < AGES - 1 { (self.now as usize - age) % AGES } else { AGES };
                if kind.oldest(at).is_some() {
                    least = Some((number, at, worth));
                } else if at < AGES {
                    kind.filled &= !(1 << at);
                }
            }
        }
        self.next = least;
        least.and_then(|(kind, at, _)| self.kinds[kind].oldest(at))
    }

    fn evicted(&mut self, pieces: &Pieces, slot: u32, key: u64, units: u64) {
        let piece = &pieces[slot];
        let note = (piece.stamp << KIND_BITS) | (u32::from(piece.queue) % KINDS as u32);
        self.ghosts.remember(
            key,
            note,
            units,
            REMEMBERED * self.capacity,
            REMEMBERED as usize * self.keys,
        );
    }

    fn remembers(&self) -> bool {
        true
    }

    fn warmest(&self) -> Option<u32> {
        let lists = (0..AGES - 1).flat_map(|age| {
            let at = (self.now as usize - age) % AGES;
            self.kinds.iter().rev().map(move |kind| &kind.ages[at])
        });
        let mut lists = lists.chain(self.kinds.iter().map(|kind| &kind.old));
        lists.find_map(List::newest)
    }

    fn memory_bytes(&self) -> usize {
        let kind = size_of::<[List; AGES]>() + 3 * size_of::<[f32; AGES]>();
        self.ghosts.memory_bytes() + KINDS * kind
    }
}
