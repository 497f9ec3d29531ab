//! Volumes are added, drained and lost, and return, while threads put, get and delete short and
//! long pages: each byte that a get delivers is right, and calls fail only with errors of kind
//! `Retry`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::items::Item;
use common::*;
use ritornello_format::ErrorKind;
use ritornello_medium::{Faulty, Host, Medium, MediumFault, Op, Rule, Schedule, SimDisk};
use ritornello_store::{CapacityChange, ClientId, Options, PutOptions, Store, open_segments};
use ritornello_volume::segments::IoChoice;
use ritornello_volume::staging::Staging;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Bytes of a long page: more than 16 MiB, so that the page is striped over all volumes, and not a
/// multiple of 4 KiB.
const LONG: u64 = 16 * MIB + 5_001;
const THREADS: usize = 4;
/// Minimum number of calls that complete before [`under_load`] makes its change, and again after
/// the change.
const CALLS: usize = 24;

/// Items of short and long pages in chained and unchained scopes, whose model names begin with
/// `model`: `short` items of each kind of short pages, and one of each kind of long pages.
fn items(model: &str, short: u64) -> Vec<Item> {
    let short = (0..short).flat_map(|name| {
        [
            Item::new(&format!("{model} chained"), name, 40_001, true, 6),
            Item::new(&format!("{model} unchained"), name, 70_001, false, 6),
        ]
    });
    let long = [
        Item::new(&format!("{model} long chained"), 1, LONG, true, 2),
        Item::new(&format!("{model} long unchained"), 1, LONG + 1_000_000, false, 1),
    ];
    short.chain(long).collect()
}

fn put_all(open: &Open, items: &[Item], options: &PutOptions) {
    for item in items {
        let outcome = item.put_with(&open.store, options).unwrap();
        assert_eq!(outcome.pages, item.keys.len(), "{}", item.scope.model);
    }
    open.store.flush().unwrap();
}

fn assert_hits<'a>(store: &Store, items: impl IntoIterator<Item = &'a Item>) {
    for item in items {
        let outcome = item.get(store).unwrap();
        assert_eq!(outcome.pages, item.keys.len(), "{}: {}", item.scope.model, outcome.reason);
    }
}

/// Stops all threads of a load when it is dropped, so also when a thread panics.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Calls `change` while threads put, get and delete `items`. Each thread uses one of `stores`.
fn under_load(stores: &[&Store], items: &[Item], change: impl FnOnce()) {
    let (stop, calls) = (&AtomicBool::new(false), &AtomicUsize::new(0));
    let wait_for_calls = || {
        let until = calls.load(Ordering::Relaxed) + CALLS;
        while calls.load(Ordering::Relaxed) < until && !stop.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    std::thread::scope(|threads| {
        for thread in 0..THREADS {
            let store = stores[thread % stores.len()];
            threads.spawn(move || {
                let _stop = Stop(stop);
                let mut turn = thread * 7;
                while !stop.load(Ordering::Relaxed) {
                    let item = &items[turn % items.len()];
                    let failed = match (turn / items.len() + thread) % 4 {
                        0 | 2 => item.put(store).err(),
                        1 => item.get(store).err(),
                        _ => store.delete(&item.scope, &refs(&item.keys)).err(),
                    };
                    let is_retry = failed.as_ref().is_none_or(|e| e.kind() == ErrorKind::Retry);
                    assert!(is_retry, "{failed:?}");
                    calls.fetch_add(1, Ordering::Relaxed);
                    turn += 1;
                }
            });
        }
        let _stop = Stop(stop);
        wait_for_calls();
        change();
        wait_for_calls();
    });
}

/// Opens the store of `home` as a client of the core of `open`, in this process.
fn client(open: &Open, medium: Arc<dyn Medium>, home: &Path) -> Arc<Store> {
    let (_, segments) = open_segments(medium, home, IoChoice::Auto).unwrap();
    let catalog = Arc::new(open.core.catalog_for(ClientId(7), "seven"));
    Store::new(catalog, segments, Staging::new(8 * MIB as usize).unwrap())
}

fn assert_none_evicted(open: &Open) {
    let counters = open.core.stats().unwrap().counters;
    assert_eq!(counters["evicted_pages"], 0, "pages were evicted although all pages fit");
}

/// Checks that no page is damaged and no space is lost, and that all pages of `kept` are hits, also
/// after the next opening. Closes the store.
fn check_consistent(open: Open, medium: Arc<dyn Medium>, home: &Path, kept: &[Item]) {
    open.core.run_once();
    open.store.flush().unwrap();
    open.store.flush().unwrap();
    let stats = open.core.stats().unwrap();
    assert!(stats.absent_space.reasons.is_empty(), "{:?}", stats.absent_space);
    assert_eq!((stats.leases, stats.reservations), (0, 0));
    assert_eq!((stats.deferred_bytes, stats.reserved_bytes, stats.quarantined_bytes), (0, 0, 0));
    let counted: u64 = stats.paths.iter().map(|path| path.segments).sum();
    assert_eq!(stats.segments, counted, "{:?}", stats.paths);
    assert!(stats.allocated_bytes <= stats.capacity_bytes);
    let report = open.core.verify(true, &mut |_, _| {}).unwrap();
    assert!(report.findings.is_empty(), "{report:?}");
    assert_hits(&open.store, kept);
    let used = open.core.stats().unwrap().used_bytes;
    open.close();
    let again = Options { background_threads: false, ..Options::new(home) };
    let open = open_on(medium, &again).unwrap();
    assert_eq!(open.core.stats().unwrap().used_bytes, used, "space was lost");
    assert_hits(&open.store, kept);
    open.close();
}

#[test]
fn volume_is_added_and_another_drained() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let at = |name: &str| dir.path().join(name);
    let text = |name: &str| at(name).to_str().unwrap().to_owned();
    let home = at("home");
    let (paths, segment_bytes) = (vec![at("a"), at("b")], Some(8 * MIB));
    let options = Options { paths, segment_bytes, ..options(&home, 320) };
    let open = open_beside(Arc::new(Host), &options, Arc::new(|_| true)).unwrap();
    let (kept, moving) = (items("kept", 3), items("moving", 3));
    // The pages are retained, because puts may evict other pages: on a slow disk, deleted pages
    // take up the space of the store faster than syncs make it reusable.
    let retained = PutOptions { retain_until: (options.wall_clock)() + 3600, ..Default::default() };
    put_all(&open, &kept, &retained);
    let other = client(&open, Arc::new(Host), &home);
    let change = |change| open.core.change_capacity(&change, Duration::from_secs(60));
    under_load(&[&open.store, &other], &moving, || {
        change(CapacityChange::AddVolume(text("c"))).unwrap();
        assert_hits(&other, &kept);
        change(CapacityChange::DrainVolume(text("a"))).unwrap();
        assert_hits(&other, &kept);
    });
    let volumes = &open.core.manifest().volumes;
    assert!(volumes[0].is_retired() && volumes.len() == 3, "{volumes:?}");
    assert_eq!(
        std::fs::read_dir(at("a")).unwrap().count(),
        0,
        "the drained directory is not empty"
    );
    assert!(kept.iter().all(|item| !item.volumes(&open).contains(&0)));
    other.close();
    // Drop the client before the next opening: it holds the core, and with it the index, which a
    // process cannot open twice.
    drop(other);
    check_consistent(open, Arc::new(Host), &home, &kept);
}

/// Options of a store in `/store` on a simulated disk, with its segments in `dirs`.
fn simulated(dirs: &[&str], mib: u64, segment_mib: u64) -> Options {
    let paths = dirs.iter().map(PathBuf::from).collect();
    let segment_bytes = Some(segment_mib * MIB);
    Options { paths, segment_bytes, background_threads: false, ..options(Path::new("/store"), mib) }
}

#[test]
fn lost_volume_returns() {
    let home = Path::new("/store");
    let (disk, b) = (SimDisk::new(512 * MIB), Path::new("/b"));
    let medium = || Arc::new(disk.clone());
    let options = simulated(&["/a", "/b", "/c"], 320, 8);
    let open = open_beside(medium(), &options, Arc::new(|_| true)).unwrap();
    let (kept, moving) = (items("kept", 5), items("moving", 3));
    put_all(&open, &kept, &PutOptions::default());
    let elsewhere: Vec<&Item> =
        kept.iter().filter(|item| !item.volumes(&open).contains(&1)).collect();
    assert!(
        (5..kept.len()).contains(&elsewhere.len()),
        "{} of {} items have no page on volume 1",
        elsewhere.len(),
        kept.len()
    );
    let elsewhere = || elsewhere.iter().copied();

    // Unmount the volume while the owner and a client use the store: both keep the segments that
    // they have open.
    let other = client(&open, medium(), home);
    assert_hits(&other, &kept[..4]);
    under_load(&[&open.store, &other], &moving, || {
        disk.detach(b).unwrap();
        assert_hits(&other, elsewhere());
        assert_hits(&open.store, &kept);
    });
    // A segment that a put was creating when the volume was unmounted may be left below the mount
    // point. The store does not use it.
    assert!(disk.created_under(b).len() <= 1, "{:?}", disk.created_under(b));
    under_load(&[&open.store, &other], &moving, || disk.mount(b).unwrap());
    assert_hits(&other, &kept);
    other.close();
    open.store.flush().unwrap();
    open.close();

    // The next owner opens the store without the volume.
    disk.unmount(b).unwrap();
    let open = open_beside(medium(), &options, Arc::new(|_| true)).unwrap();
    assert_eq!(open.core.stats().unwrap().absent_space.reasons.len(), 1);
    let other = client(&open, medium(), home);
    under_load(&[&open.store, &other], &moving, || {
        assert_hits(&other, elsewhere());
        assert_hits(&open.store, elsewhere());
        open.core.run_once();
        assert!(disk.created_under(b).is_empty());
        disk.mount(b).unwrap();
        open.core.run_once();
        assert_hits(&open.store, &kept);
    });
    other.close();
    assert_none_evicted(&open);
    check_consistent(open, medium(), home, &kept);
}

/// A volume fails all writes and syncs, and can still be read. A flush poisons the owner, the next
/// owner opens the store without the volume, and the volume returns when it takes writes again.
#[test]
fn volume_that_fails_writes_returns() {
    let home = Path::new("/store");
    let (disk, schedule) = (SimDisk::new(512 * MIB), Schedule::new());
    let medium = || Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
    let options = simulated(&["/a", "/b", "/c"], 320, 8);
    let open = open_on(medium(), &options).unwrap();
    let (kept, moving) = (items("kept", 5), items("moving", 3));
    put_all(&open, &kept, &PutOptions::default());
    let elsewhere: Vec<&Item> =
        kept.iter().filter(|item| !item.volumes(&open).contains(&1)).collect();
    under_load(&[&open.store], &moving, || {
        // Threads may not have written to the volume yet. The flush has to sync the volume for the
        // next item, which lies on all volumes. Syncs fail before the put, so that no background
        // sync makes the item durable first. If such a sync fails first, the put is refused.
        schedule.add(Rule::always(MediumFault::Io).on(Op::SyncData).at("/b/"));
        let _ = items("unflushed", 0)[0].put(&open.store);
        schedule.add(Rule::always(MediumFault::Io).on(Op::Write).at("/b/"));
        // An opening tests each volume with a file. This self-test writes nothing to a simulated
        // file, so the open of the file must fail as well.
        schedule.add(Rule::always(MediumFault::Io).on(Op::Open).at("/b/.selftest"));
        assert_eq!(open.store.flush().unwrap_err().kind(), ErrorKind::Retry);
        assert_hits(&open.store, &kept);
    });
    open.store.close();
    assert!(open.core.close().is_err(), "the close of a poisoned store must fail");
    drop(open);

    let open = open_on(medium(), &options).unwrap();
    assert_eq!(open.core.stats().unwrap().absent_space.reasons.len(), 1);
    under_load(&[&open.store], &moving, || {
        assert_hits(&open.store, elsewhere);
        open.store.flush().unwrap();
        schedule.heal();
        open.core.run_once();
        assert_hits(&open.store, &kept);
    });
    assert_none_evicted(&open);
    check_consistent(open, medium(), home, &kept);
}

/// One of two volumes has room for two segments only. Further pages go to the other volume, and no
/// put is refused.
#[test]
fn tiny_volume_refuses_no_put_beside_a_large_volume() {
    let home = Path::new("/store");
    let (disk, schedule) = (SimDisk::new(512 * MIB), Schedule::new());
    schedule.add(Rule::nth(3, MediumFault::NoSpace).onward().on(Op::Allocate).at("/tiny/seg-"));
    let medium = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule));
    let options = simulated(&["/large", "/tiny"], 320, 8);
    let open = open_on(medium, &options).unwrap();
    let all: Vec<Item> = items("one", 8).into_iter().chain(items("two", 8)).collect();
    under_load(&[&open.store], &all, || open.store.flush().unwrap());
    put_all(&open, &all, &PutOptions::default());
    let stats = open.core.stats().unwrap();
    let segments: Vec<u64> = stats.paths.iter().map(|path| path.segments).collect();
    assert!(segments[1] == 2 && segments[0] > 10, "{segments:?}");
    assert!(all.iter().any(|item| item.volumes(&open) == [0, 1]));
    // Put more bytes than are free: puts evict, and none is refused.
    for name in 0..4 {
        for item in items(&format!("more {name}"), 1) {
            assert_eq!(item.put(&open.store).unwrap().pages, item.keys.len());
            assert_hits(&open.store, [&item]);
        }
    }
    assert!(open.core.stats().unwrap().counters["evicted_pages"] > 0);
    open.store.flush().unwrap();
    open.store.flush().unwrap();
    let report = open.core.verify(false, &mut |_, _| {}).unwrap();
    assert!(report.findings.is_empty(), "{report:?}");
    let used = open.core.stats().unwrap().used_bytes;
    open.close();
    let open =
        open_on(Arc::new(disk), &Options { background_threads: false, ..Options::new(home) });
    let open = open.unwrap();
    assert_eq!(open.core.stats().unwrap().used_bytes, used, "space was lost");
    open.close();
}

/// Threads put short and long pages into a new store at the same time: no put finds the store full,
/// and the numbers of segments of the volumes differ by at most one.
#[test]
fn concurrent_puts_grow_all_volumes() {
    let disk = SimDisk::new(512 * MIB);
    let open = open_on(Arc::new(disk), &simulated(&["/a", "/b", "/c", "/d"], 216, 16)).unwrap();
    let all: Vec<Item> = items("one", 12).into_iter().chain(items("two", 12)).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|threads| {
        for _ in 0..6 {
            threads.spawn(|| {
                // Put in reverse order, so that short puts follow while the long pages, which are
                // last in the list, are put.
                while let Some(item) = all.iter().rev().nth(next.fetch_add(1, Ordering::Relaxed)) {
                    let outcome = item.put(&open.store).unwrap();
                    assert_eq!((outcome.pages, outcome.reason), (item.keys.len(), ""));
                }
            });
        }
    });
    let stats = open.core.stats().unwrap();
    assert_eq!(stats.counters["evicted_pages"], 0);
    let segments: Vec<u64> = stats.paths.iter().map(|path| path.segments).collect();
    let (least, most) = (segments.iter().min().unwrap(), segments.iter().max().unwrap());
    assert!(most - least <= 1, "{segments:?}");
    assert_hits(&open.store, &all);
    open.close();
}
