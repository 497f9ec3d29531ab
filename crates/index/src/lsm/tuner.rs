//! The tuner of the index `lsm`: turns counts of operations and measured times into a setting (size
//! ratio, runs per level), and the setting into RocksDB's options.

use super::families::Families;
use super::keys::Family;
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
    applied_options: Mutex<Applied>,
    memtable: f64,
}

/// The shape whose options RocksDB was given last. `None` until the first call of [`Tuner::tune`]:
/// the open does not set `max_read_amp`, the maximum number of runs.
#[derive(Debug, Default)]
struct Applied {
    shape: Option<TreeShape>,
    /// Number of flushes of memtables when [`Tuner::tune`] last computed a shape.
    flushes: u64,
}

impl Tuner {
    pub(super) fn new(options: &LsmOptions) -> Self {
        Self {
            applied_options: Mutex::new(Applied::default()),
            // A flush writes tables of about half the memtable's size. The estimate is used until
            // `db.meter` has counted a flush.
            memtable: options.memtable_bytes as f64 / 2.0,
        }
    }

    /// Decides on a target setting if the window of at least 4,096 operations, which the controller
    /// (`controller.rs`) counts, is full. After a flush, changes the applied setting by one step
    /// towards the target. May wait until RocksDB has written the changed options to a file.
    pub(super) fn tune(&self, db: &Families) -> Result<()> {
        let Some(mut applied_options) = self.applied_options.try_lock() else { return Ok(()) };
        let setting = db.controller.applied();
        let entries = db.controller.writes();
        let log = db.db.property_int_value(properties::MIN_LOG_NUMBER_TO_KEEP).ok().flatten();
        let log = log.unwrap_or(0);
        let flushes = db.meter.flushes(
            &db.options,
            log,
            entries,
            |memtable| (tree(db, memtable), sorted_runs(db)),
            setting,
        );
        if db.controller.is_due() {
            let decision = db.controller.decide(self.tree_now(db), &db.meter.prices(&db.options));
            if let Some(decision) = decision.filter(|decision| decision.from != decision.to) {
                tracing::info!(
                    ?decision,
                    path = %db.db.path().display(),
                    "the shape of the LSM-tree changes"
                );
            }
        }
        let step = db.controller.step(flushes);
        if applied_options.shape.is_some() && step.is_none() && applied_options.flushes == flushes {
            return Ok(());
        }
        applied_options.flushes = flushes;
        let shape = TreeShape::new(step.unwrap_or(setting), &self.tree_now(db));
        if applied_options.shape != Some(shape) {
            apply(db, &shape, applied_options.shape.is_none())?;
            applied_options.shape = Some(shape);
        }
        Ok(())
    }

    fn tree_now(&self, db: &Families) -> TreeSize {
        tree(db, db.meter.flush_bytes().unwrap_or(self.memtable))
    }

    pub(super) fn tuning(&self, db: &Families) -> Tuning {
        let controller = &db.controller;
        let tree = self.tree_now(db);
        let applied = controller.applied();
        Tuning {
            adaptive: controller.is_adaptive(),
            operations: controller.operations(),
            applied,
            target: controller.target(),
            levels: tree.levels(applied.ratio),
            sorted_runs: sorted_runs(db),
            rewrites: db.meter.rewrites(&db.options),
            tree,
            prices: db.meter.prices(&db.options),
            decisions: controller.log(),
        }
    }
}

/// With `first`, gives all families their options, because the open cannot set `max_read_amp`: the
/// crate `rocksdb` has no setter for it. Later, gives the changed options to the family of page
/// hashes only. Run names ascend, so most keys of the other families arrive in order: their tables
/// hardly overlap, and RocksDB moves such tables without merging them, whatever the options. Each
/// change of a family's options makes writers wait while RocksDB writes the options to a file.
fn apply(db: &Families, shape: &TreeShape, first: bool) -> Result<()> {
    apply_to_family(db, Family::Page, shape)?;
    if first {
        let mut others = Family::ALL.into_iter().filter(|family| *family != Family::Page);
        others.try_for_each(|family| apply_to_family(db, family, &shape.tallest()))?;
    }
    Ok(())
}

fn apply_to_family(db: &Families, family: Family, shape: &TreeShape) -> Result<()> {
    let names = shape.options();
    let names = names.each_ref().map(|(name, value)| (*name, value.as_str()));
    db.db.set_options_cf(db.handle(family)?, &names).map_err(|error| {
        Error::fatal("RocksDB refused the options for the shape of the LSM-tree: report this")
            .because(error)
    })
}

fn tree(db: &Families, memtable: f64) -> TreeSize {
    let bytes = |family: Family| {
        let handle = db.handle(family).ok()?;
        db.db.property_int_value_cf(handle, properties::LIVE_SST_FILES_SIZE).ok()?
    };
    let bytes: u64 = Family::ALL.into_iter().filter_map(bytes).sum();
    TreeSize { bytes: bytes as f64, memtable }
}

/// Sorted runs of the family of page hashes: the files of level 0, and the levels below that
/// are not empty.
fn sorted_runs(db: &Families) -> u64 {
    let Ok(handle) = db.handle(Family::Page) else { return 0 };
    let files = |level: usize| {
        let name = properties::num_files_at_level(level);
        let files = db.db.property_value_cf(handle, &name).ok().flatten();
        files.and_then(|files| files.parse().ok()).unwrap_or(0_u64)
    };
    files(0) + (1..=LEVELS).map(|level| files(level).min(1)).sum::<u64>()
}
