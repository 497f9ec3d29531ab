//! A store over several directories whose first directory is lost is restored from its other
//! directories.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::{ErrorKind, Scope, checksum};
use ritornello_medium::{Access, Faulty, Medium, MediumFault, Op, Rule, Schedule, SimDisk};
use ritornello_store::{
    CapacityChange, Catalog, ClientId, Directory, Options, Restore, Restored, VOLUME_COPIES,
};
use ritornello_volume::segments::Segments;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const PAGE: u64 = 32 << 10;
const SINGLES: usize = 60;
const CHAINS: u64 = 8;
const OTHERS: [&str; 2] = ["/a", "/b"];

fn listed() -> Options {
    let further_dirs = Some(OTHERS.iter().map(PathBuf::from).collect());
    Options { further_dirs, background_threads: false, ..options(Path::new("/store"), 24) }
}

/// Why no process can open the store, as its files tell. Checks that this is a problem of the store.
fn unopenable(disk: &SimDisk) -> Option<String> {
    let directory = Directory::new(Arc::new(disk.clone()), Path::new("/store"));
    let stored = directory.stored_stats().ok()??;
    assert!(stored.unopenable.as_ref().is_none_or(|why| stored.problems.contains(why)));
    stored.unopenable
}

fn open_sim(disk: &SimDisk) -> Open {
    open_on(Arc::new(disk.clone()), &listed()).unwrap()
}

fn restore_on(medium: Arc<dyn Medium>, others: &[&str]) -> ritornello_format::Result<Restored> {
    let others: Vec<PathBuf> = others.iter().map(PathBuf::from).collect();
    Restore::plan(&medium, Path::new("/store"), &others)?.run(&mut |_, _| ())
}

fn restore(disk: &SimDisk) -> Restored {
    restore_on(Arc::new(disk.clone()), &OTHERS).unwrap()
}

fn singles() -> Vec<Vec<u8>> {
    sequence(1000, SINGLES)
}

/// Puts single pages of an unchained scope, and chains in three puts each. The runs take turns on
/// the volumes.
fn fill(open: &Open) {
    for key in singles().chunks(1) {
        assert_eq!(put(&open.store, &unchained(PAGE), key, None).pages, 1);
    }
    for name in 0..CHAINS {
        let keys = sequence(name, 8);
        for pages in [2, 5, 8] {
            assert_eq!(put(&open.store, &chained(PAGE), &keys[..pages], None).pages, pages);
        }
    }
    open.store.flush().unwrap();
}

/// For each page, the volume on which its run begins, and the generation of this run.
fn places(open: &Open, scope: &Scope, keys: &[Vec<u8>]) -> Vec<(u8, u64)> {
    let catalog = open.core.catalog_for(ClientId::LOCAL, "");
    let reference = catalog.resolve(scope, false).unwrap().unwrap();
    let locate = |at: usize| {
        let keys = if scope.chained { &keys[..=at] } else { &keys[at..=at] };
        let located = catalog.begin_read(reference, &refs(keys)).unwrap();
        catalog.release(located.lease).unwrap();
        let place = &located.runs.last().unwrap().place;
        (place.extents[0].segment.volume(), place.generation)
    };
    (0..keys.len()).map(locate).collect()
}

/// The pages that remain if volume 0 is lost: single pages on other volumes, and of each chain the
/// pages before its first page on volume 0. `generation` is the highest generation before the loss.
struct Expected {
    singles: Vec<bool>,
    chains: Vec<usize>,
    generation: u64,
}

impl Expected {
    fn of(open: &Open) -> Self {
        let found = places(open, &unchained(PAGE), &singles());
        let mut generation = found.iter().map(|(_, generation)| *generation).max().unwrap();
        let mut chains = Vec::new();
        for name in 0..CHAINS {
            let found = places(open, &chained(PAGE), &sequence(name, 8));
            chains.push(found.iter().take_while(|(volume, _)| *volume != 0).count());
            generation = generation.max(found.iter().map(|(_, number)| *number).max().unwrap());
        }
        let singles: Vec<bool> = found.iter().map(|(volume, _)| *volume != 0).collect();
        let left = singles.iter().filter(|there| **there).count();
        assert!((10..SINGLES - 10).contains(&left), "{left} single pages are on other volumes");
        assert!(chains.iter().any(|pages| *pages > 0) && chains.iter().any(|pages| *pages < 8));
        Self { singles, chains, generation }
    }

    fn check(&self, open: &Open) {
        assert_eq!(get(&open.store, &unchained(PAGE), &singles()).ok, self.singles);
        for (name, pages) in (0..CHAINS).zip(&self.chains) {
            let found = get(&open.store, &chained(PAGE), &sequence(name, 8));
            assert_eq!(found.pages, *pages, "chain {name}");
        }
    }

    /// Checks the pages of a restored store, puts the lost pages again, and checks all pages after
    /// the next opening.
    fn check_use(&self, disk: &SimDisk) {
        let open = open_sim(disk);
        let stats = open.store.stats().unwrap().catalog;
        let dirs: Vec<String> = stats.paths.into_iter().map(|path| path.dir).collect();
        assert_eq!(dirs, ["/a", "/b", "segments"]);
        self.check(&open);
        fill(&open);
        let again = places(&open, &unchained(PAGE), &singles());
        for (at, (volume, generation)) in again.into_iter().enumerate() {
            assert_eq!(self.singles[at], generation <= self.generation, "page {at}");
            assert!(volume > 0, "page {at} is on the retired volume 0");
        }
        open.close();
        let open = open_sim(disk);
        assert_eq!(get(&open.store, &unchained(PAGE), &singles()).pages, SINGLES);
        for name in 0..CHAINS {
            assert_eq!(get(&open.store, &chained(PAGE), &sequence(name, 8)).pages, 8);
        }
        let report = open.core.verify(false, &mut |_, _| {}).unwrap();
        assert_eq!((report.findings.len(), report.pages_dropped), (0, 0));
        open.close();
    }
}

fn read(disk: &SimDisk, path: &str) -> Vec<u8> {
    let file = disk.open(Path::new(path), Access::default()).unwrap();
    let mut bytes = vec![0; file.length().unwrap() as usize];
    file.read_at(&mut bytes, 0).unwrap();
    bytes
}

fn write(disk: &SimDisk, path: &str, bytes: &[u8]) {
    let access = Access { write: true, create: true, direct: false };
    let file = disk.open(Path::new(path), access).unwrap();
    file.set_len(0).unwrap();
    file.write_at(bytes, 0).unwrap();
    file.sync_data().unwrap();
}

fn copies() -> Vec<String> {
    let paths = OTHERS.map(|dir| VOLUME_COPIES.map(|name| format!("{dir}/{name}")));
    paths.concat()
}

fn lose_first(disk: &SimDisk) {
    disk.unmount(Path::new("/store")).unwrap();
}

#[test]
fn lost_first_directory_costs_its_pages_and_pages_chained_behind_them() {
    for seed in 0..4 {
        let disk = SimDisk::new(96 * MIB);
        let open = open_sim(&disk);
        fill(&open);
        let expected = Expected::of(&open);
        let disk = if seed == 0 {
            open.close();
            disk
        } else {
            // The owner is killed, and the power fails.
            open.core.run_once();
            let after = disk.crash(seed);
            open.forget();
            after
        };
        lose_first(&disk);
        let error = open_on(Arc::new(disk.clone()), &listed()).map(Open::close).unwrap_err();
        assert!(error.to_string().contains("`ritornello paths restore /store /a /b`"), "{error}");
        let restored = restore(&disk);
        let singles = expected.singles.iter().filter(|there| **there).count() as u64;
        let chained: usize = expected.chains.iter().sum();
        let found = &restored.verification;
        assert_eq!(found.pages_salvaged - found.pages_behind_lost, singles + chained as u64);
        assert_eq!((restored.scopes, restored.absent.len()), (2, 0));
        expected.check_use(&disk);
    }
}

/// In an unchained scope, a restore salvages all pages of a run except its damaged page.
#[test]
fn damaged_page_is_lost_alone_in_an_unchained_scope() {
    let disk = SimDisk::new(96 * MIB);
    let open = open_sim(&disk);
    let scope = unchained(PAGE);
    let mut damaged = Vec::new();
    for name in 0..9 {
        let keys = sequence(name, 8);
        assert_eq!(put(&open.store, &scope, &keys, None).pages, 8);
        let catalog = open.core.catalog_for(ClientId::LOCAL, "");
        let reference = catalog.resolve(&scope, false).unwrap().unwrap();
        let located = catalog.begin_read(reference, &refs(&keys)).unwrap();
        catalog.release(located.lease).unwrap();
        assert_eq!(located.runs.len(), 1);
        let third = located.runs[0].place.page(2)[0];
        let dir = ["/store/segments", "/a", "/b"][usize::from(third.segment.volume())];
        let path = format!("{dir}/{}", Segments::file_name(third.segment));
        damaged.push((keys, path, third.offset()));
    }
    open.close();
    damaged.retain(|(_, path, _)| !path.starts_with("/store"));
    assert!(damaged.len() > 3, "{}", damaged.len());
    for (_, path, offset) in &damaged {
        let access = Access { write: true, ..Access::default() };
        let file = disk.open(Path::new(path), access).unwrap();
        file.write_at(&[0xA5; 100], *offset).unwrap();
        file.sync_data().unwrap();
    }
    lose_first(&disk);
    let report = restore(&disk).verification;
    assert_eq!(report.pages_salvaged, 7 * damaged.len() as u64);
    assert_eq!(report.not_salvaged, [("overwritten".to_owned(), damaged.len() as u64)].into());
    for round in 0..2 {
        let open = open_sim(&disk);
        for (keys, ..) in &damaged {
            let ok = get(&open.store, &scope, keys).ok;
            assert_eq!(ok, [true, true, round > 0, true, true, true, true, true]);
            assert_eq!(put(&open.store, &scope, keys, None).pages, 8);
        }
        let stats = open.store.stats().unwrap().catalog;
        assert!(stats.dropped_at_open.is_empty(), "{:?}", stats.dropped_at_open);
        assert!(open.core.verify(true, &mut |_, _| {}).unwrap().findings.is_empty());
        open.store.flush().unwrap();
        open.close();
    }
}

/// The manifest and its copy are damaged: the error names the command to run.
#[test]
fn error_of_damaged_manifests_names_the_restore_command() {
    let (manifest, copy) = ("/store/MANIFEST", "/store/MANIFEST.copy");
    for (missing, unreadable) in [(None, None), (Some(manifest), None), (None, Some(manifest))] {
        let disk = SimDisk::new(96 * MIB);
        let open = open_sim(&disk);
        fill(&open);
        let expected = Expected::of(&open);
        open.close();
        write(&disk, manifest, b"RTRNMANI damaged");
        write(&disk, copy, b"RTRNMANI damaged");
        if let Some(path) = missing {
            disk.remove(Path::new(path)).unwrap();
        }
        let schedule = Schedule::new();
        if let Some(path) = unreadable {
            schedule.add(Rule::nth(1, MediumFault::Io).on(Op::Read).at(path).onward());
        }
        let medium = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule));
        let error = open_on(medium, &listed()).map(Open::close).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Fatal, "{missing:?} {unreadable:?}: {error}");
        for part in ["move the directory elsewhere", "`ritornello paths restore /store /a /b`"] {
            assert!(error.to_string().contains(part), "{missing:?} {unreadable:?}: {error}");
        }
        lose_first(&disk);
        restore(&disk);
        expected.check_use(&disk);
    }
}

/// Pages after a lost page are salvaged too, and are hits once the lost page is put again.
#[test]
fn pages_behind_a_lost_page_return_with_it() {
    let disk = SimDisk::new(96 * MIB);
    let open = open_sim(&disk);
    fill(&open);
    let all: Vec<_> =
        (0..CHAINS).map(|name| places(&open, &chained(PAGE), &sequence(name, 8))).collect();
    open.close();
    lose_first(&disk);
    assert!(restore(&disk).verification.pages_behind_lost > 0);
    let open = open_sim(&disk);
    for (name, places) in (0..CHAINS).zip(all) {
        let keys = sequence(name, 8);
        let lost: Vec<usize> = (0..8).filter(|at| places[*at].0 == 0).collect();
        if let (Some(first), Some(last)) = (lost.first(), lost.last()) {
            let parent = first.checked_sub(1).map(|at| keys[at].as_slice());
            put(&open.store, &chained(PAGE), &keys[*first..=*last], parent);
        }
        assert_eq!(get(&open.store, &chained(PAGE), &keys).pages, 8, "chain {name}");
    }
    open.close();
}

/// An evicted run of a sequence may still have an intact first page on the disk. If the sequence
/// was put again, the later run has all pages, and is the run to salvage.
#[test]
fn salvage_prefers_a_later_run_to_an_evicted_run() {
    let disk = SimDisk::new(96 * MIB);
    let open = open_sim(&disk);
    for round in 0..30 {
        for name in 0..40 {
            let name = if name < 10 { name } else { name + 100 * round };
            put(&open.store, &chained(PAGE), &sequence(name, 12), None);
        }
    }
    assert!(open.store.stats().unwrap().catalog.counters["evicted_pages"] > 0);
    let mut expected = Vec::new();
    for name in (0..10).chain(2910..2940) {
        let found = get(&open.store, &chained(PAGE), &sequence(name, 12)).pages;
        let places = places(&open, &chained(PAGE), &sequence(name, 12)[..found]);
        expected.push((name, places.iter().take_while(|(volume, _)| *volume != 0).count()));
    }
    assert!(expected.iter().filter(|(_, pages)| *pages == 12).count() > 5, "{expected:?}");
    open.store.flush().unwrap();
    open.close();
    lose_first(&disk);
    restore(&disk);
    let open = open_sim(&disk);
    for (name, pages) in expected {
        let found = get(&open.store, &chained(PAGE), &sequence(name, 12)).pages;
        assert!(found >= pages, "only {found} of {pages} pages of sequence {name}");
    }
    open.close();
}

/// The copies are of an earlier owner, which knew fewer scopes.
#[test]
fn stale_copies_cost_only_later_scopes() {
    let disk = SimDisk::new(96 * MIB);
    let open = open_sim(&disk);
    put(&open.store, &unchained(PAGE), &sequence(1, 1), None);
    put(&open.store, &chained(PAGE), &sequence(1, 1), None);
    open.close();
    let old: Vec<Vec<u8>> = copies().iter().map(|path| read(&disk, path)).collect();
    let late = Scope::opaque("late", PAGE, false);
    for _ in 0..3 {
        let open = open_sim(&disk);
        open.store.flush().unwrap();
        open.close();
    }
    let open = open_sim(&disk);
    fill(&open);
    assert_eq!(put(&open.store, &late, &sequence(7, 12), None).pages, 12);
    open.store.flush().unwrap();
    let expected = Expected::of(&open);
    let late_slot = slot(&open, &late);
    open.forget();
    for (path, bytes) in copies().iter().zip(&old) {
        write(&disk, path, bytes);
    }
    lose_first(&disk);
    let restored = restore(&disk);
    assert!(restored.verification.not_salvaged.get("scope").is_none_or(|pages| *pages == 12));
    let open = open_sim(&disk);
    assert_eq!(get(&open.store, &late, &sequence(7, 12)).pages, 0);
    put(&open.store, &late, &sequence(8, 1), None);
    if restored.verification.not_salvaged.contains_key("scope") {
        assert!(slot(&open, &late) > late_slot, "the slot of the lost scope was used again");
    }
    open.close();
    expected.check_use(&disk);
}

fn slot(open: &Open, scope: &Scope) -> u32 {
    let catalog = open.core.catalog_for(ClientId::LOCAL, "");
    catalog.resolve(scope, false).unwrap().unwrap().slot.0
}

/// The copy of the scopes on one volume lists a scope that the copy on the other volume no longer
/// lists, because the scope was dropped.
#[test]
fn scope_dropped_by_any_copy_stays_dropped() {
    let disk = SimDisk::new(96 * MIB);
    let open = open_sim(&disk);
    fill(&open);
    open.core.run_once();
    let old = [read(&disk, "/a/VOLUME.manifest"), read(&disk, "/a/VOLUME.scopes")];
    let catalog = open.core.catalog_for(ClientId::LOCAL, "");
    catalog.drop_scope(catalog.resolve(&chained(PAGE), false).unwrap().unwrap()).unwrap();
    open.close();
    write(&disk, "/a/VOLUME.manifest", &old[0]);
    write(&disk, "/a/VOLUME.scopes", &old[1]);
    lose_first(&disk);
    assert_eq!(restore(&disk).scopes, 1);
    let open = open_sim(&disk);
    assert_eq!(get(&open.store, &chained(PAGE), &sequence(1, 8)).pages, 0);
    open.close();
}

/// The directories of a restored store.
fn dirs_on(disk: &SimDisk, options: &Options) -> Vec<String> {
    let open = open_on(Arc::new(disk.clone()), options).unwrap();
    let stats = open.store.stats().unwrap().catalog;
    open.close();
    stats.paths.into_iter().map(|path| path.dir).collect()
}

/// An owner adds a directory. One volume keeps an earlier copy of this owner's manifest, which does
/// not name the directory.
#[test]
fn latest_copy_of_an_owner_is_used() {
    let disk = SimDisk::new(96 * MIB);
    let open = open_sim(&disk);
    fill(&open);
    open.core.run_once();
    let old = read(&disk, "/a/VOLUME.manifest");
    let add = CapacityChange::AddVolume("/c".to_owned());
    open.core.change_capacity(&add, Duration::from_secs(60)).unwrap();
    open.core.run_once();
    open.forget();
    write(&disk, "/a/VOLUME.manifest", &old);
    lose_first(&disk);
    for others in [["/a", "/b"], ["/b", "/a"]] {
        let disk = disk.crash(1);
        restore_on(Arc::new(disk.clone()), &others).unwrap();
        assert_eq!(dirs_on(&disk, &listed()), ["/a", "/b", "/c", "segments"], "{others:?}");
    }
}

/// The lost directory held no segments, so the restored directory holds none.
#[test]
fn restored_directory_gets_no_segments_if_it_had_none() {
    let disk = SimDisk::new(96 * MIB);
    let paths = OTHERS.map(PathBuf::from).to_vec();
    let options = Options { paths, further_dirs: None, ..listed() };
    let open = open_on(Arc::new(disk.clone()), &options).unwrap();
    assert_eq!(put(&open.store, &unchained(PAGE), &singles(), None).pages, SINGLES);
    open.close();
    lose_first(&disk);
    assert_eq!(restore(&disk).verification.pages_salvaged, SINGLES as u64);
    assert_eq!(dirs_on(&disk, &options), OTHERS);
}

/// The disk of the lost directory is mounted again after the restore.
#[test]
fn returning_first_directory_is_refused() {
    let disk = SimDisk::new(96 * MIB);
    let open = open_sim(&disk);
    fill(&open);
    open.close();
    lose_first(&disk);
    restore(&disk);
    let copy = read(&disk, "/a/VOLUME.manifest");
    let refused = |disk: &SimDisk| {
        let error = open_on(Arc::new(disk.clone()), &listed()).map(Open::close).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains("restored in another directory"), "{error}");
        assert_eq!(unopenable(disk), Some(error.to_string()));
    };
    disk.mount(Path::new("/store")).unwrap();
    refused(&disk);
    assert_eq!(read(&disk, "/a/VOLUME.manifest"), copy);
    disk.unmount(Path::new("/store")).unwrap();
    open_sim(&disk).close();
    // Restore the store a second time, in another directory.
    let medium: Arc<dyn Medium> = Arc::new(disk.clone());
    let others = OTHERS.map(PathBuf::from);
    let again = Restore::plan(&medium, Path::new("/again"), &others).unwrap();
    again.run(&mut |_, _| ()).unwrap();
    refused(&disk);
    // An operator gives up the second store, and removes its copies from the volumes.
    for path in copies() {
        disk.remove(Path::new(&path)).unwrap();
    }
    open_sim(&disk).close();
}

#[test]
fn restore_without_a_directory_leaves_it_absent() {
    let disk = SimDisk::new(96 * MIB);
    let open = open_sim(&disk);
    fill(&open);
    open.close();
    lose_first(&disk);
    disk.unmount(Path::new("/b")).unwrap();
    let restored = restore_on(Arc::new(disk.clone()), &["/a"]).unwrap();
    assert_eq!(restored.absent, ["/b"]);
    assert!(disk.created_under(Path::new("/b")).is_empty());
    let open = open_sim(&disk);
    let before = get(&open.store, &unchained(PAGE), &singles()).ok;
    disk.mount(Path::new("/b")).unwrap();
    open.core.run_once();
    assert!(open.core.verify(true, &mut |_, _| {}).unwrap().pages_salvaged > 0);
    let after = get(&open.store, &unchained(PAGE), &singles()).ok;
    let count = |ok: &[bool]| ok.iter().filter(|ok| **ok).count();
    assert!(count(&after) > count(&before), "{after:?}");
    open.close();
}

/// A directory that a restore left out returns after puts have filled the store: its segments are
/// neither removed nor reused before `fsck --salvage` has searched them.
#[test]
fn left_out_directory_keeps_its_pages_until_it_is_searched() {
    let disk = SimDisk::new(96 * MIB);
    let open = open_sim(&disk);
    fill(&open);
    let places = places(&open, &unchained(PAGE), &singles());
    let left_out: Vec<usize> = (0..SINGLES).filter(|at| places[*at].0 == 2).collect();
    assert!(left_out.len() > 5, "{left_out:?}");
    open.close();
    lose_first(&disk);
    disk.unmount(Path::new("/b")).unwrap();
    restore_on(Arc::new(disk.clone()), &["/a"]).unwrap();
    let open = open_sim(&disk);
    let put_more = |open: &Open, names: std::ops::Range<u64>| {
        for name in names {
            put(&open.store, &chained(PAGE), &sequence(name, 8), None);
            open.core.run_once();
        }
    };
    put_more(&open, 100..200);
    assert!(open.store.stats().unwrap().catalog.counters["evicted_pages"] > 0);
    disk.mount(Path::new("/b")).unwrap();
    put_more(&open, 200..300);
    let absent = |open: &Open| open.store.stats().unwrap().catalog.absent_space.reasons;
    assert!(absent(&open)[0].contains("`ritornello fsck --salvage`"), "{:?}", absent(&open));
    open.close();
    let open = open_sim(&disk);
    put_more(&open, 300..400);
    assert_eq!(absent(&open).len(), 1, "{:?}", absent(&open));
    open.core.verify(true, &mut |_, _| {}).unwrap();
    assert_eq!(absent(&open), [""; 0]);
    let found = get(&open.store, &unchained(PAGE), &singles()).ok;
    for at in left_out {
        assert!(found[at], "page {at} is lost");
    }
    put_more(&open, 400..500);
    assert_eq!(get(&open.store, &chained(PAGE), &sequence(499, 8)).pages, 8);
    open.close();
    let open = open_sim(&disk);
    assert_eq!(absent(&open), [""; 0]);
    assert!(open.core.verify(false, &mut |_, _| {}).unwrap().findings.is_empty());
    open.close();
}

/// More than 1,024 scopes, most with their only page in a directory that the restore left out.
#[test]
fn scopes_of_a_left_out_directory_are_kept_until_it_is_searched() {
    const SCOPES: u64 = 1100;
    let scope = |salt: u64| Scope::opaque(&format!("salt {salt}"), 300, true);
    let (disk, keys) = (SimDisk::new(96 * MIB), sequence(1, 1));
    let open = open_sim(&disk);
    for salt in 0..SCOPES {
        assert_eq!(put(&open.store, &scope(salt), &keys, None).pages, 1, "scope {salt}");
    }
    let volume = |salt: &u64| places(&open, &scope(*salt), &keys)[0].0;
    let left_out: Vec<u64> = (0..SCOPES).filter(|salt| volume(salt) == 2).collect();
    assert!(left_out.len() > 50, "{}", left_out.len());
    open.close();
    lose_first(&disk);
    disk.unmount(Path::new("/b")).unwrap();
    restore_on(Arc::new(disk.clone()), &["/a"]).unwrap();
    disk.mount(Path::new("/b")).unwrap();
    for _ in 0..2 {
        open_sim(&disk).close();
    }
    let open = open_sim(&disk);
    open.core.verify(true, &mut |_, _| {}).unwrap();
    for salt in left_out {
        assert_eq!(get(&open.store, &scope(salt), &keys).pages, 1, "scope {salt}");
    }
    open.close();
}

#[test]
fn unsuitable_directories_are_refused() {
    let make = || {
        let disk = SimDisk::new(96 * MIB);
        let open = open_sim(&disk);
        fill(&open);
        open.close();
        disk
    };
    let refused = |disk: &SimDisk, others: &[&str], words: &str| {
        let error = restore_on(Arc::new(disk.clone()), others).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(words), "{error}");
    };
    let disk = make();
    refused(&disk, &OTHERS, "not empty");
    lose_first(&disk);
    write(&disk, "/store/notes", b"mine");
    refused(&disk, &OTHERS, "not a Ritornello store");
    disk.remove(Path::new("/store/notes")).unwrap();
    refused(&disk, &["/a", "/c"], "no marker");
    refused(&disk, &["/a", "/a"], "listed twice");
    refused(&disk, &[], "no directory");
    // One copy of the manifest has format 2, which this build does not read.
    let intact: Vec<Vec<u8>> = copies().iter().map(|path| read(&disk, path)).collect();
    let mut later = intact[0].clone();
    later[8] = 2;
    let end = later.len() - 8;
    let sum = checksum(&later[..end]).to_le_bytes();
    later[end..].copy_from_slice(&sum);
    write(&disk, "/a/VOLUME.manifest", &later);
    refused(&disk, &OTHERS, "is of format 2");
    // All copies are damaged.
    for path in &copies() {
        write(&disk, path, b"another program");
    }
    refused(&disk, &OTHERS, "not a Ritornello");
    for (path, bytes) in copies().iter().zip(&intact) {
        let mut bytes = bytes.clone();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        write(&disk, path, &bytes);
    }
    refused(&disk, &OTHERS, "intact copy");
    for path in &copies() {
        disk.remove(Path::new(path)).unwrap();
    }
    refused(&disk, &OTHERS, "intact copy");
    // The directories belong to two stores.
    let other = Options { dir: "/other".into(), further_dirs: Some(vec!["/c".into()]), ..listed() };
    open_on(Arc::new(disk.clone()), &other).unwrap().close();
    refused(&disk, &["/a", "/c"], "different stores");
    // One intact pair of copies suffices.
    for (path, bytes) in copies().iter().zip(&intact).skip(2) {
        write(&disk, path, bytes);
    }
    restore(&disk);
    refused(&disk, &OTHERS, "not empty");
}

/// All operations of a restore fail from one of its operations on, and the power fails. Until the
/// restore is repeated, an opening fails, or finds all pages because the restore was complete.
#[test]
fn interrupted_restore_can_be_repeated() {
    let disk = SimDisk::new(96 * MIB);
    let open = open_sim(&disk);
    fill(&open);
    let expected = Expected::of(&open);
    open.close();
    lose_first(&disk);
    let base = disk.crash(0);
    let (mut fails, mut told, mut at) = (0, 0, 1);
    loop {
        let disk = base.crash(at);
        let schedule = Schedule::new();
        schedule.add(Rule::nth(at, MediumFault::Io).onward());
        let medium = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule));
        let ended = restore_on(medium, &OTHERS).is_ok();
        let disk = disk.crash(at + 1);
        if !ended {
            fails += 1;
            let why = unopenable(&disk);
            told += usize::from(why.as_ref().is_some_and(|why| why.contains("interrupted")));
            if let Ok(open) = open_on(Arc::new(disk.clone()), &listed()) {
                // The failed operation came after the restore was complete on the disk.
                assert_eq!(why, None);
                expected.check(&open);
                open.close();
            } else {
                restore(&disk);
            }
        }
        let open = open_sim(&disk);
        expected.check(&open);
        open.close();
        if ended {
            break;
        }
        at += 1 + at / 8;
    }
    assert!(fails > 20 && told > 0, "{fails} {told}");
}
