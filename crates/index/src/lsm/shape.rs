//! Maps the size ratio of levels and the number of sorted runs per level to the options of
//! RocksDB's universal compaction, which can be changed while the database is open.
//! `docs/adaptive-lsm.md` describes the limits of this mapping.
//!
//! | rule | options of RocksDB |
//! |---|---|
//! | when a level has `K` runs, the next run causes a merge | `min_merge_width` = `max_merge_width` = `level0_file_num_compaction_trigger` = K + 1; for K = 1, `max_merge_width` is unlimited |
//! | the merge includes the next older run if it has at most `T / K` times the total size of the newer runs | `size_ratio` = 100 (T / K - 1) |
//! | `L` levels | `max_read_amp` = K L, at least K + 1 |
//! | `K L` runs do not slow writers down | `level0_slowdown_writes_trigger`, `level0_stop_writes_trigger` |

use crate::tuning::{Setting, TreeSize};
use rocksdb::{Options, UniversalCompactOptions};

/// RocksDB slows writers down when the LSM-tree has `SLOW` sorted runs more than
/// [`TreeShape::most`], and stops them at `STOP` runs more.
const SLOW: u32 = 20;
const STOP: u32 = 36;

/// The intended structure of the LSM-tree: size ratio and sorted runs per level (`setting`), and
/// levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TreeShape {
    setting: Setting,
    /// Number of levels, at least one.
    levels: u32,
}

impl TreeShape {
    pub(super) fn new(setting: Setting, tree: &TreeSize) -> Self {
        Self { setting, levels: tree.levels(setting.ratio).max(1) }
    }

    /// Returns the shape with 24 levels, for families whose options are set once, before their
    /// trees grow: 1 TiB with memtables of 64 KiB and the smallest size ratio needs 24 levels.
    pub(super) fn tallest(&self) -> Self {
        Self { levels: 24, ..*self }
    }

    /// Minimum number of sorted runs that one compaction merges.
    const fn width(&self) -> u32 {
        self.setting.runs + 1
    }

    /// Maximum number of sorted runs that one compaction merges; unlimited if the setting allows
    /// one run per level.
    const fn widest(&self) -> u32 {
        if self.setting.runs == 1 { i32::MAX as u32 } else { self.width() }
    }

    /// RocksDB's option `size_ratio`, in percent; its meaning is in the table of this module.
    const fn size_ratio(&self) -> u32 {
        100 * self.setting.ratio / self.setting.runs - 100
    }

    /// Size of all sorted runs except the oldest, in percent of the oldest, at which RocksDB merges
    /// all runs. Only a merge of all runs drops deletions: the oldest run may hold the deleted
    /// keys.
    const fn amplification(&self) -> u32 {
        200 * self.setting.runs
    }

    /// Maximum number of sorted runs of the LSM-tree.
    const fn most(&self) -> u32 {
        let most = self.setting.runs * self.levels;
        // RocksDB requires at least the number of runs that starts a merge.
        if most > self.width() { most } else { self.width() }
    }

    /// Sets the options of a database that is not open yet, except the maximum number of runs: the
    /// crate `rocksdb` has no setter for it, and after the open it is set by its name in
    /// [`TreeShape::options`].
    pub(super) fn open_with(&self, options: &mut Options) {
        let mut universal = UniversalCompactOptions::default();
        universal.set_size_ratio(self.size_ratio() as i32);
        universal.set_min_merge_width(self.width() as i32);
        universal.set_max_merge_width(self.widest() as i32);
        universal.set_max_size_amplification_percent(self.amplification() as i32);
        options.set_universal_compaction_options(&universal);
        options.set_level_zero_file_num_compaction_trigger(self.width() as i32);
        options.set_level_zero_slowdown_writes_trigger((self.most() + SLOW) as i32);
        options.set_level_zero_stop_writes_trigger((self.most() + STOP) as i32);
    }

    /// The options for an open database, as names and values.
    pub(super) fn options(&self) -> [(&'static str, String); 4] {
        let universal = format!(
            "{{size_ratio={};min_merge_width={};max_merge_width={};\
             max_size_amplification_percent={};max_read_amp={};allow_trivial_move=true}}",
            self.size_ratio(),
            self.width(),
            self.widest(),
            self.amplification(),
            self.most()
        );
        [
            ("compaction_options_universal", universal),
            ("level0_file_num_compaction_trigger", self.width().to_string()),
            ("level0_slowdown_writes_trigger", (self.most() + SLOW).to_string()),
            ("level0_stop_writes_trigger", (self.most() + STOP).to_string()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leveling_and_tiering_map_to_options() {
        let tree = TreeSize { bytes: 99e6, memtable: 1e6 };
        let words = |ratio, runs| TreeShape::new(Setting { ratio, runs }, &tree).options();
        let leveling = words(10, 1);
        assert!(leveling[0].1.starts_with("{size_ratio=900;min_merge_width=2;"), "{leveling:?}");
        assert!(leveling[0].1.contains("max_read_amp=2;"), "{leveling:?}");
        let tiering = words(4, 3);
        let merge = "{size_ratio=33;min_merge_width=4;max_merge_width=4;";
        assert!(tiering[0].1.starts_with(merge), "{tiering:?}");
        assert!(tiering[0].1.contains("max_read_amp=12;"), "{tiering:?}");
        assert_eq!(tiering[1].1, "4");
    }

    #[test]
    fn every_shape_allows_enough_runs_to_merge() {
        for setting in Setting::all() {
            for bytes in [0.0, 2e6, 1e9] {
                let shape = TreeShape::new(setting, &TreeSize { bytes, memtable: 1e6 });
                assert!(shape.most() >= shape.width() && shape.levels >= 1);
            }
        }
    }
}
