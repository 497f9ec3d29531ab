//! A store in `/store` whose segments are in `/a` and `/b`.

use super::*;
use ritornello_medium::SimDisk;

/// Number of sequences that [`fill`] puts; each has 8 pages of 64 KiB.
pub const SEQUENCES: u64 = 12;
pub const PAGES: usize = 96;

pub fn two_volumes() -> Options {
    let paths = vec!["/a".into(), "/b".into()];
    Options { paths, background_threads: false, ..options(Path::new("/store"), 16) }
}

pub fn at(dir: &str) -> Options {
    Options { background_threads: false, ..Options::new(Path::new(dir)) }
}

pub fn reopen(medium: Arc<dyn Medium>) -> Open {
    open_on(medium, &at("/store")).unwrap()
}

/// Puts sequences into a new store on both volumes, flushes and closes it.
pub fn fill(disk: &SimDisk) {
    fill_with(disk, &two_volumes());
}

pub fn fill_with(disk: &SimDisk, options: &Options) {
    let open = open_on(Arc::new(disk.clone()), options).unwrap();
    for name in 0..SEQUENCES {
        assert_eq!(put(&open.store, &chained(65_536), &sequence(name, 8), None).pages, 8);
    }
    open.store.flush().unwrap();
    let paths = open.store.stats().unwrap().catalog.paths;
    assert!(paths.iter().all(|path| path.used_bytes > 0), "{paths:?}");
    open.close();
}

/// Gets the sequences of [`fill`]. Returns the number of leading pages that were delivered, summed
/// over the sequences.
pub fn found(open: &Open) -> usize {
    (0..SEQUENCES).map(|name| get(&open.store, &chained(65_536), &sequence(name, 8)).pages).sum()
}

pub fn evicted(open: &Open) -> u64 {
    open.store.stats().unwrap().catalog.counters["evicted_pages"]
}
