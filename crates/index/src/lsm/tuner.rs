//! The tuner: turns counts and times into a setting, and the setting into RocksDB's options.

use super::controller::{Controller, Mode};
use super::families::{Families, Family};
use super::meter::Meter;
use super::options::LsmOptions;
use super::shape::TreeShape;
use crate::sync::Mutex;
use crate::tuning::{TreeSize, Tuning};
use ritornello_format::{Error, Result};
use rocksdb::properties;

/// Levels of RocksDB besides level 0.
const LEVELS: usize = 6;

#[derive(Debug)]
pub(super) struct Tuner {
    pub(super) controller: Controller,
    pub(super) meter: Meter,
    applied_options: Mutex<Applied>,
    memtable: f64,
}

/// The options that RocksDB was given last. The bound of all runs cannot be given at open.
#[derive(Debug, Default)]
struct Applied {
    shape: Option<TreeShape>,
    /// Number of flushes at that time.
    flushes: u64,
}

impl Tuner {
    pub(super) fn new(options: &LsmOptions) -> Self {
        Self {
            controller: Controller::new(options.mode),
            meter: Meter::new(options),
            applied_options: Mutex::new(Applied::default()),
            // Tables take about half of the memory of their entries.
            memtable: options.memtable_bytes as f64 / 2.0,
        }
    }
}

impl Families {
    /// Sets whether the setting follows the operations or is fixed.
    pub(super) fn set_mode(&self, mode: Mode) {
        self.tuner.controller.set_mode(mode);
    }

    /// Makes a decision if a window is full, and goes one step towards the target after a flush.
    /// May wait until RocksDB has written the changed options to a file.
    pub(super) fn tune(&self) -> Result<()> {
        let tuner = &self.tuner;
        let Some(mut applied_options) = tuner.applied_options.try_lock() else { return Ok(()) };
        let setting = tuner.controller.applied();
        let entries = tuner.controller.writes();
        let log = self.db.property_int_value(properties::MIN_LOG_NUMBER_TO_KEEP).ok().flatten();
        let log = log.unwrap_or(0);
        let flushes = tuner.meter.flushes(
            &self.options,
            log,
            entries,
            |memtable| (self.tree(memtable), self.sorted_runs()),
            setting,
        );
        if tuner.controller.is_due() {
            let decision =
                tuner.controller.decide(self.tree_now(), &tuner.meter.prices(&self.options));
            if let Some(decision) = decision.filter(|decision| decision.from != decision.to) {
                tracing::info!(?decision, path = %self.db.path().display(), "the tree's shape");
            }
        }
        let step = tuner.controller.step(flushes);
        if applied_options.shape.is_some() && step.is_none() && applied_options.flushes == flushes {
            return Ok(());
        }
        applied_options.flushes = flushes;
        let shape = TreeShape::new(step.unwrap_or(setting), &self.tree_now());
        if applied_options.shape != Some(shape) {
            self.apply(&shape, applied_options.shape.is_none())?;
            applied_options.shape = Some(shape);
        }
        Ok(())
    }

    /// Gives all families their options once, because some cannot be given at open; later only the
    /// family of page hashes. The keys of other families arrive in order, so their tables hardly
    /// overlap and are moved, independent of the sizes; and writers wait while RocksDB records a
    /// change of options in a file.
    fn apply(&self, shape: &TreeShape, first: bool) -> Result<()> {
        self.apply_to_family(Family::Page, shape)?;
        if first {
            let mut others = Family::ALL.into_iter().filter(|family| *family != Family::Page);
            others.try_for_each(|family| self.apply_to_family(family, &shape.tallest()))?;
        }
        Ok(())
    }

    fn apply_to_family(&self, family: Family, shape: &TreeShape) -> Result<()> {
        let names = shape.options();
        let names = names.each_ref().map(|(name, value)| (*name, value.as_str()));
        self.db
            .set_options_cf(self.handle(family)?, &names)
            .map_err(|error| Error::fatal("RocksDB refuses the shape of the tree").because(error))
    }

    fn tree_now(&self) -> TreeSize {
        self.tree(self.tuner.meter.flush_bytes().unwrap_or(self.tuner.memtable))
    }

    fn tree(&self, memtable: f64) -> TreeSize {
        let bytes = |family: Family| {
            let handle = self.handle(family).ok()?;
            self.db.property_int_value_cf(handle, properties::LIVE_SST_FILES_SIZE).ok()?
        };
        let bytes: u64 = Family::ALL.into_iter().filter_map(bytes).sum();
        TreeSize { bytes: bytes as f64, memtable }
    }

    /// Sorted runs of the family of page hashes: the files of level 0, and the levels below that
    /// are not empty.
    fn sorted_runs(&self) -> u64 {
        let Ok(handle) = self.handle(Family::Page) else { return 0 };
        let files = |level: usize| {
            let name = properties::num_files_at_level(level);
            let files = self.db.property_value_cf(handle, &name).ok().flatten();
            files.and_then(|files| files.parse().ok()).unwrap_or(0_u64)
        };
        files(0) + (1..=LEVELS).map(|level| files(level).min(1)).sum::<u64>()
    }

    pub(super) fn tuning(&self) -> Tuning {
        let controller = &self.tuner.controller;
        let tree = self.tree_now();
        let applied = controller.applied();
        Tuning {
            adaptive: controller.is_adaptive(),
            operations: controller.operations(),
            applied,
            target: controller.target(),
            levels: tree.levels(applied.ratio),
            sorted_runs: self.sorted_runs(),
            rewrites: self.tuner.meter.rewrites(&self.options),
            tree,
            prices: self.tuner.meter.prices(&self.options),
            decisions: controller.log(),
        }
    }
}
