//! Watches the operations on the index, and selects the size ratio between the levels of RocksDB's
//! tree, and the maximum number of sorted runs per level, that cost least for these operations.
//!
//! **Off by default**, like the backend: the cargo feature `lsm` compiles the controller, and a
//! store whose index is `lsm` runs it. With [`Mode::Static`] no decision changes the setting.
//!
//! Counting an operation takes one or two relaxed atomic additions. Decisions are made in
//! [`Controller::decide`], which only [`crate::PrefixIndex::maintain_after`] calls. A new target is
//! not applied immediately: [`Controller::step`] returns settings on the way to the target, at most
//! one per flush, so that a transition causes no additional rewrites.

use crate::tuning::{Mix, Prices, Reason, Setting, TreeSize, TuningDecision};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Minimum operations per window, the consecutive operations for which one [`Mix`] is counted. With
/// fewer than a few thousand operations the mix is mostly noise.
const WINDOW: u64 = 4096;
/// Maximum windows over which a decision averages the mix. After a shift of the mix, earlier
/// windows do not count.
const WINDOWS: usize = 16;
/// Consecutive windows that must differ from the mix of the last decision to count as a shift.
const CONFIRM: usize = 2;
/// Distance of a window's mix from the mix of the last decision ([`Mix::distance`]) above which the
/// window counts towards a shift.
const SHIFT: f64 = 0.15;
/// Share of the cost of the current target setting that a new target must save. A smaller predicted
/// saving may be an error of the cost model.
const GAIN: f64 = 0.1;
/// Factor by which the tree must grow or shrink before the same mix leads to a new decision.
const GROWTH: f64 = 2.0;
/// Maximum number of decisions in [`Controller::log`].
const LOG: usize = 64;

/// Whether the controller changes the [`Setting`]: the size ratio and the number of sorted runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// The controller changes the setting to suit the operations.
    #[default]
    Adaptive,
    /// The setting is fixed, for comparisons.
    Static(Setting),
}

impl Mode {
    /// The setting with which an index is opened.
    #[must_use]
    pub const fn start(self) -> Setting {
        match self {
            Self::Adaptive => Setting::DEFAULT,
            Self::Static(setting) => setting,
        }
    }
}

#[derive(Debug, Default)]
struct Counts {
    writes: AtomicU64,
    hits: AtomicU64,
    ranges: AtomicU64,
    empty: AtomicU64,
}

impl Counts {
    fn now(&self) -> [u64; 4] {
        [&self.writes, &self.hits, &self.ranges, &self.empty].map(|count| count.load(Relaxed))
    }
}

#[derive(Debug)]
struct State {
    mode: Mode,
    /// The counts of operations at the start of the current window.
    began: [u64; 4],
    windows: VecDeque<Mix>,
    /// The mix of operations and the size of the tree at the last decision.
    anchor: Option<(Mix, TreeSize)>,
    /// Consecutive windows whose mix differed from the mix of the last decision.
    differing: usize,
    target: Setting,
    applied: Setting,
    /// Number of flushes of memtables at the last step of `applied` towards `target`.
    events: u64,
    log: VecDeque<TuningDecision>,
}

/// See the [module](self).
#[derive(Debug)]
pub struct Controller {
    counts: Counts,
    state: Mutex<State>,
}

impl Controller {
    /// A controller with the initial setting of `mode`.
    #[must_use]
    pub fn new(mode: Mode) -> Self {
        let setting = mode.start();
        let state = State {
            mode,
            began: [0; 4],
            windows: VecDeque::with_capacity(WINDOWS),
            anchor: None,
            differing: 0,
            target: setting,
            applied: setting,
            events: 0,
            log: VecDeque::new(),
        };
        Self { counts: Counts::default(), state: Mutex::new(state) }
    }

    /// Sets the mode. With [`Mode::Static`] the given setting becomes the target.
    pub fn set_mode(&self, mode: Mode) {
        let mut state = self.state.lock();
        state.mode = mode;
        if let Mode::Static(setting) = mode {
            state.target = setting;
        }
    }

    /// Counts entries written or removed.
    pub fn wrote(&self, entries: u64) {
        self.counts.writes.fetch_add(entries, Relaxed);
    }

    /// Counts point lookups: `hits` found their key, `empty` found nothing.
    pub fn looked_up(&self, hits: u64, empty: u64) {
        self.counts.hits.fetch_add(hits, Relaxed);
        self.counts.empty.fetch_add(empty, Relaxed);
    }

    /// Counts range reads.
    pub fn ranged(&self, ranges: u64) {
        self.counts.ranges.fetch_add(ranges, Relaxed);
    }

    /// Whether the current window is full; if not, [`Controller::decide`] has no effect. `false`
    /// also while another thread holds the lock.
    #[must_use]
    pub fn is_due(&self) -> bool {
        let Some(state) = self.state.try_lock() else { return false };
        sum(self.counts.now()) >= sum(state.began) + WINDOW
    }

    /// Closes the window if it is full, and makes a decision if one of the [`Reason`]s holds.
    /// Returns the decision.
    pub fn decide(&self, tree: TreeSize, prices: &Prices) -> Option<TuningDecision> {
        let mut state = self.state.lock();
        let now = self.counts.now();
        if sum(now) < sum(state.began) + WINDOW {
            return None;
        }
        let window = difference(now, state.began);
        state.began = now;
        if state.windows.len() == WINDOWS {
            state.windows.pop_front();
        }
        state.windows.push_back(window);
        if let Some((anchor, _)) = state.anchor {
            state.differing =
                if window.distance(&anchor) > SHIFT { state.differing + 1 } else { 0 };
        }
        let reason = state.reason(&tree)?;
        if reason == Reason::Shift {
            // Windows before the shift belong to another workload.
            let keep = state.differing.min(state.windows.len());
            let old = state.windows.len() - keep;
            state.windows.drain(..old);
        }
        let mix = state.mix();
        state.differing = 0;
        state.anchor = Some((mix, tree));
        let from = state.target;
        let best = match state.mode {
            Mode::Adaptive => prices.best(&mix, &tree),
            Mode::Static(setting) => setting,
        };
        let cost_from = prices.cost(&mix, &tree, from);
        let cost_best = prices.cost(&mix, &tree, best);
        let to = if cost_best < cost_from * (1.0 - GAIN) { best } else { from };
        state.target = to;
        let cost_to = prices.cost(&mix, &tree, to);
        let decision =
            TuningDecision { at: sum(now), reason, mix, tree, from, to, cost_from, cost_to };
        if state.log.len() == LOG {
            state.log.pop_front();
        }
        state.log.push_back(decision);
        Some(decision)
    }

    /// Returns the setting to apply next. `None` if the target is reached, or if `events`, the
    /// number of flushes so far, has not changed since the last step.
    pub fn step(&self, events: u64) -> Option<Setting> {
        let mut state = self.state.lock();
        if state.applied == state.target || state.events == events {
            return None;
        }
        state.events = events;
        state.applied = state.applied.towards(state.target);
        Some(state.applied)
    }

    /// The setting that was applied last.
    #[must_use]
    pub fn applied(&self) -> Setting {
        self.state.lock().applied
    }

    /// The setting that [`Controller::step`] approaches.
    #[must_use]
    pub fn target(&self) -> Setting {
        self.state.lock().target
    }

    /// Whether the mode is [`Mode::Adaptive`].
    #[must_use]
    pub fn is_adaptive(&self) -> bool {
        self.state.lock().mode == Mode::Adaptive
    }

    /// Number of entries written or removed so far.
    #[must_use]
    pub fn writes(&self) -> u64 {
        self.counts.writes.load(Relaxed)
    }

    /// Number of operations of all kinds that were counted so far.
    #[must_use]
    pub fn operations(&self) -> u64 {
        sum(self.counts.now())
    }

    /// The latest decisions, oldest first.
    #[must_use]
    pub fn log(&self) -> Vec<TuningDecision> {
        self.state.lock().log.iter().copied().collect()
    }
}

impl State {
    fn reason(&self, tree: &TreeSize) -> Option<Reason> {
        let Some((_, then)) = &self.anchor else { return Some(Reason::First) };
        // Entries that fit the memtable form no tree, so the size of a tree counts as at least the
        // size of the memtable.
        let grown = tree.bytes.max(tree.memtable) / then.bytes.max(then.memtable);
        if self.differing >= CONFIRM {
            Some(Reason::Shift)
        } else if !(1.0 / GROWTH..=GROWTH).contains(&grown) {
            Some(Reason::Growth)
        } else {
            None
        }
    }

    fn mix(&self) -> Mix {
        let mut all = Mix::default();
        for window in &self.windows {
            all.writes += window.writes;
            all.hits += window.hits;
            all.ranges += window.ranges;
            all.empty += window.empty;
        }
        all.normalised()
    }
}

fn sum(counts: [u64; 4]) -> u64 {
    counts.iter().sum()
}

fn difference(now: [u64; 4], then: [u64; 4]) -> Mix {
    let since = |kind: usize| now[kind].saturating_sub(then[kind]) as f64;
    Mix { writes: since(0), hits: since(1), ranges: since(2), empty: since(3) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRICES: Prices =
        Prices { rewrite: 400.0, filter: 100.0, block: 1500.0, seek: 1500.0, false_positive: 0.01 };
    const TREE: TreeSize = TreeSize { bytes: 4e9, memtable: 16e6 };

    fn write(controller: &Controller, windows: u64) -> Vec<TuningDecision> {
        (0..windows)
            .filter_map(|_| {
                controller.wrote(WINDOW);
                controller.decide(TREE, &PRICES)
            })
            .collect()
    }

    fn read(controller: &Controller, windows: u64) -> Vec<TuningDecision> {
        (0..windows)
            .filter_map(|_| {
                controller.looked_up(WINDOW / 2, WINDOW / 2);
                controller.decide(TREE, &PRICES)
            })
            .collect()
    }

    #[test]
    fn shifted_mix_causes_one_decision_after_two_windows() {
        let controller = Controller::new(Mode::Adaptive);
        assert_eq!(write(&controller, 20).len(), 1);
        assert_eq!(read(&controller, 1), []);
        let decided = read(&controller, 20);
        assert_eq!(decided.len(), 1);
        assert_eq!(decided[0].reason, Reason::Shift);
        assert!(decided[0].to.runs < decided[0].from.runs);
        assert!(decided[0].cost_to < decided[0].cost_from);
        assert!(decided[0].mix.writes < 1e-9, "the mix must have reads only");
    }

    #[test]
    fn single_differing_window_leads_to_no_decision() {
        let controller = Controller::new(Mode::Adaptive);
        write(&controller, 4);
        for _ in 0..10 {
            assert_eq!(read(&controller, 1), []);
            assert_eq!(write(&controller, 3), []);
        }
    }

    #[test]
    fn growth_of_the_tree_alone_leads_to_a_decision() {
        let controller = Controller::new(Mode::Adaptive);
        write(&controller, 2);
        controller.wrote(WINDOW);
        let grown = TreeSize { bytes: TREE.bytes * 3.0, ..TREE };
        assert_eq!(controller.decide(grown, &PRICES).map(|made| made.reason), Some(Reason::Growth));
    }

    #[test]
    fn step_changes_each_parameter_by_at_most_one_after_a_flush() {
        let controller = Controller::new(Mode::Adaptive);
        read(&controller, 1);
        let target = controller.log()[0].to;
        let mut events = 0;
        let mut steps = 0;
        while controller.applied() != target {
            assert_eq!(controller.step(events), None, "a step needs a further flush");
            events += 1;
            let before = controller.applied();
            let after = controller.step(events).unwrap();
            assert!(
                before.ratio.abs_diff(after.ratio) <= 1 && before.runs.abs_diff(after.runs) <= 1
            );
            steps += 1;
        }
        assert!(steps > 1);
        assert_eq!(controller.step(events + 1), None);
    }

    #[test]
    fn static_mode_keeps_its_setting() {
        let setting = Setting { ratio: 10, runs: 1 };
        let controller = Controller::new(Mode::Static(setting));
        write(&controller, 3);
        read(&controller, 5);
        assert_eq!(controller.applied(), setting);
        assert!(controller.log().len() >= 2);
        assert!(controller.log().iter().all(|made| made.to == setting));
    }

    #[test]
    fn decision_log_is_bounded() {
        let controller = Controller::new(Mode::Adaptive);
        for _ in 0..2 * LOG {
            write(&controller, 2);
            read(&controller, 2);
        }
        assert_eq!(controller.log().len(), LOG);
    }
}
