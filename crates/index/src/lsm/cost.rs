//! The cost of an operation on a fluid LSM-tree, as a function of its size ratio `T` and of `K`,
//! the maximum number of sorted runs per level.
//!
//! The model is taken from Dostoevsky (Dayan and Idreos, SIGMOD 2018, section 4.4): `K = 1` is
//! leveling, `K = T - 1` is tiering. This model differs from the paper in four ways. Every level,
//! also the last level, may have `K` runs, and the filters of all runs have the same number of bits
//! per key, because RocksDB has no other options. Rewrites follow RocksDB's own rules. Reads pay
//! for the mean number of runs instead of the maximum. Prices are measured nanoseconds, as in CAMAL
//! (Yu and others, SIGMOD 2024), instead of block transfers. Most of an index is in memory, where a
//! visit of a run costs processor time even if no block is read.

use crate::tuning::{Mix, Prices, Setting, TreeSize};

impl Setting {
    /// The largest size ratio considered. With larger ratios the number of levels hardly decreases.
    pub const RATIO_MAX: u32 = 12;
    /// The setting of a new index. In the measurement of `docs/adaptive-lsm.md` in which settings
    /// affect the cost, it costs at most 1 % more than the best measured static setting.
    pub const DEFAULT: Self = Self { ratio: 8, runs: 7 };

    /// Every setting, smaller size ratios first.
    pub fn all() -> impl Iterator<Item = Self> {
        (2..=Self::RATIO_MAX).flat_map(|ratio| (1..ratio).map(move |runs| Self { ratio, runs }))
    }

    /// One step from `self` towards `target`: each parameter changes by at most one, and `runs`
    /// stays below `ratio`.
    #[must_use]
    pub fn towards(self, target: Self) -> Self {
        let step = |from: u32, to: u32| match from.cmp(&to) {
            std::cmp::Ordering::Less => from + 1,
            std::cmp::Ordering::Equal => from,
            std::cmp::Ordering::Greater => from - 1,
        };
        let ratio = step(self.ratio, target.ratio);
        Self { ratio, runs: step(self.runs, target.runs).min(ratio - 1) }
    }
}

impl Mix {
    /// The number of all operations.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.writes + self.hits + self.ranges + self.empty
    }

    /// The mix scaled to a total of 1. A mix without operations is unchanged.
    #[must_use]
    pub fn normalised(&self) -> Self {
        let total = self.total();
        if total <= 0.0 {
            return Self::default();
        }
        Self {
            writes: self.writes / total,
            hits: self.hits / total,
            ranges: self.ranges / total,
            empty: self.empty / total,
        }
    }

    /// The share of one normalised mix that must change to make the two mixes equal, 0 to 1.
    #[must_use]
    pub fn distance(&self, other: &Self) -> f64 {
        let (a, b) = (self.normalised(), other.normalised());
        ((a.writes - b.writes).abs()
            + (a.hits - b.hits).abs()
            + (a.ranges - b.ranges).abs()
            + (a.empty - b.empty).abs())
            / 2.0
    }
}

/// Mean number of sorted runs, as a share of the number of levels times `K + 1`. The share is below
/// 1 because levels fill up and empty, and the last level is seldom full. [`FILLED`], [`ABSORBED`]
/// and [`MADE`] are fitted to a replay of RocksDB's rules, which the tests repeat.
const FILLED: f64 = 0.45;
/// Mean number of times that an entry is rewritten by one merge in which its run absorbs smaller
/// runs. On each level there are `(T - 1) / K` such merges.
const ABSORBED: f64 = 0.7;
/// Mean number of times that an entry is rewritten, on each level, by the merge that makes its run
/// from smaller runs.
const MADE: f64 = 0.5;

impl TreeSize {
    /// Number of levels below the memtable with this size ratio, as a fraction while the last level
    /// is not full; zero while all entries fit the memtable.
    #[must_use]
    pub fn depth(&self, ratio: u32) -> f64 {
        if self.bytes <= self.memtable || self.memtable <= 0.0 {
            return 0.0;
        }
        let ratio = f64::from(ratio);
        ((self.bytes / self.memtable) * (ratio - 1.0) / ratio + 1.0).log(ratio)
    }

    /// The number of levels, rounded up.
    #[must_use]
    pub fn levels(&self, ratio: u32) -> u32 {
        self.depth(ratio).ceil() as u32
    }

    /// Mean number of times that an entry is rewritten with `setting`, on all levels together.
    #[must_use]
    pub fn rewrites(&self, setting: Setting) -> f64 {
        let (ratio, runs) = (f64::from(setting.ratio), f64::from(setting.runs));
        self.depth(setting.ratio) * (ABSORBED * (ratio - 1.0) / runs + MADE)
    }

    /// Mean number of sorted runs with `setting`.
    #[must_use]
    pub fn runs(&self, setting: Setting) -> f64 {
        let depth = self.depth(setting.ratio);
        if depth == 0.0 {
            return 0.0;
        }
        let expected = FILLED * depth * (f64::from(setting.runs) + 1.0);
        expected.min(self.bytes / self.memtable).max(1.0)
    }
}

impl Prices {
    /// The cost of `mix` on `tree` with `setting`, in nanoseconds.
    #[must_use]
    pub fn cost(&self, mix: &Mix, tree: &TreeSize, setting: Setting) -> f64 {
        let runs = tree.runs(setting);
        let check = self.filter + self.false_positive * self.block;
        let write = self.rewrite * tree.rewrites(setting);
        let empty = runs * check;
        // One run has the key. On average, half of the other runs are checked before this run.
        let found = if runs > 0.0 { self.filter + self.block } else { 0.0 };
        let hit = (runs - 1.0).max(0.0) / 2.0 * check + found;
        let range = runs * self.seek;
        mix.writes * write + mix.hits * hit + mix.ranges * range + mix.empty * empty
    }

    /// The cheapest setting for `mix` on `tree`; the first of several equally cheap settings.
    #[must_use]
    pub fn best(&self, mix: &Mix, tree: &TreeSize) -> Setting {
        let cost = |setting: &Setting| self.cost(mix, tree, *setting);
        Setting::all().min_by(|a, b| cost(a).total_cmp(&cost(b))).unwrap_or(Setting::DEFAULT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRICES: Prices =
        Prices { rewrite: 400.0, filter: 100.0, block: 1500.0, seek: 1500.0, false_positive: 0.01 };
    const TREE: TreeSize = TreeSize { bytes: 4e9, memtable: 16e6 };

    fn mix(writes: f64, hits: f64, ranges: f64, empty: f64) -> Mix {
        Mix { writes, hits, ranges, empty }
    }

    #[test]
    fn reads_prefer_few_runs_and_writes_many() {
        let reads = PRICES.best(&mix(0.0, 1.0, 0.2, 1.0), &TREE);
        let writes = PRICES.best(&mix(1.0, 0.0, 0.0, 0.0), &TREE);
        assert_eq!(reads, Setting { ratio: Setting::RATIO_MAX, runs: 1 });
        assert_eq!(writes.runs, writes.ratio - 1);
    }

    #[test]
    fn best_setting_has_the_lowest_cost() {
        for step in 0..=10 {
            let writes = f64::from(step) / 10.0;
            let mix = mix(writes, (1.0 - writes) / 2.0, 0.01, (1.0 - writes) / 2.0);
            let best = PRICES.cost(&mix, &TREE, PRICES.best(&mix, &TREE));
            assert!(Setting::all().all(|setting| PRICES.cost(&mix, &TREE, setting) >= best));
        }
    }

    /// Replays the rules that the module `shape` gives RocksDB, with flushes of equal length.
    /// Returns the rewrites per entry and the mean number of sorted runs while the tree grows:
    /// first as replayed, then as predicted by the model.
    fn replay(setting: Setting, flushes: u32) -> [(f64, f64); 2] {
        let width = setting.runs as usize + 1;
        let widest = if setting.runs == 1 { usize::MAX } else { width };
        let fit = f64::from(setting.ratio) / f64::from(setting.runs);
        let mut runs: Vec<f64> = Vec::new();
        let (mut written, mut seen, mut foreseen, mut expected) = (0.0, 0.0, 0.0, 0.0);
        for flush in 1..=flushes {
            runs.insert(0, 1.0);
            let tree = TreeSize { bytes: f64::from(flush), memtable: 1.0 };
            let most = (setting.runs * tree.levels(setting.ratio)).max(width as u32) as usize;
            while let Some(picked) = pick(&runs, width, widest, fit, most) {
                let merged = runs[picked.clone()].iter().sum();
                written += merged;
                runs.splice(picked, [merged]);
            }
            assert!(runs.len() <= most, "{setting:?}: {runs:?}");
            seen += runs.len() as f64;
            foreseen += tree.rewrites(setting);
            expected += tree.runs(setting);
        }
        let mean = |sum: f64| sum / f64::from(flushes);
        [(mean(written), mean(seen)), (mean(foreseen), mean(expected))]
    }

    fn pick(
        runs: &[f64],
        width: usize,
        widest: usize,
        fit: f64,
        most: usize,
    ) -> Option<std::ops::Range<usize>> {
        let merge = |fit: f64, widest: usize| {
            (0..runs.len()).find_map(|start| {
                let mut end = start + 1;
                while end < runs.len()
                    && end - start < widest
                    && runs[start..end].iter().sum::<f64>() * fit >= runs[end]
                {
                    end += 1;
                }
                (end - start >= width).then_some(start..end)
            })
        };
        if runs.len() < width {
            return None;
        }
        let over = runs.len().checked_sub(most).filter(|over| *over > 0);
        merge(fit, widest).or_else(|| merge(f64::INFINITY, over? + 1))
    }

    #[test]
    fn model_is_within_65_percent_of_replayed_rules() {
        for (ratio, runs) in [(2, 1), (4, 1), (12, 1), (4, 2), (8, 2), (4, 3), (8, 4), (12, 11)] {
            let setting = Setting { ratio, runs };
            for flushes in [100, 300] {
                let [(written, seen), (foreseen, expected)] = replay(setting, flushes);
                let off = |is: f64, said: f64| (is / said).ln().abs();
                assert!(
                    off(written, foreseen) < 0.5,
                    "{setting:?}: {written} rewrites, not {foreseen}"
                );
                assert!(off(seen, expected) < 0.5, "{setting:?}: {seen} runs, not {expected}");
            }
        }
    }

    #[test]
    fn tree_that_fits_the_memtable_costs_nothing() {
        let small = TreeSize { bytes: 1e6, memtable: 16e6 };
        for setting in Setting::all() {
            assert_eq!(PRICES.cost(&mix(1.0, 1.0, 1.0, 1.0), &small, setting), 0.0);
        }
    }

    #[test]
    fn steps_reach_target_within_valid_settings() {
        for from in Setting::all() {
            for to in Setting::all() {
                let mut at = from;
                for _ in 0..2 * Setting::RATIO_MAX {
                    at = at.towards(to);
                    assert!(at.runs >= 1 && at.runs < at.ratio);
                }
                assert_eq!(at, to);
            }
        }
    }

    #[test]
    fn distance_of_mixes_is_one_if_disjoint_and_zero_if_equal() {
        let (writes, reads) = (mix(5.0, 0.0, 0.0, 0.0), mix(0.0, 3.0, 0.0, 0.0));
        assert_eq!(writes.distance(&reads), 1.0);
        assert_eq!(writes.distance(&mix(9.0, 0.0, 0.0, 0.0)), 0.0);
    }
}
