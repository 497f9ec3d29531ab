//! Checked-in stores of other builds: a store of format 1 opens and delivers every byte of every
//! page, and a store of format 0 is refused. `examples/make_fixture.rs` made them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::fixture::*;
use common::*;
use ritornello_format::{
    Error, ErrorKind, Manifest, RunHeader, ScopeRegistry, ScopeSlot, UNIT, checksum,
};
use ritornello_index::residency::{Holder, Residency, Tier, Tiers, Worker};
use ritornello_medium::{Host, Medium};
use ritornello_store::{Catalog, ClientId, Options, Restore, VOLUME_COPIES};
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Unpacks a fixture, whose store is in the subdirectory `store`.
fn unpacked(name: &str) -> tempfile::TempDir {
    let packed = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name);
    let dir = tempfile::tempdir().unwrap();
    let file = fs::File::open(packed).unwrap();
    tar::Archive::new(flate2::read::GzDecoder::new(file)).unpack(dir.path()).unwrap();
    dir
}

fn options_of(dir: &Path) -> Options {
    let store = dir.join("store");
    Options { capacity: None, segment_bytes: None, paths: Vec::new(), ..fixture_options(&store) }
}

fn try_open(dir: &Path) -> Result<Open, Error> {
    open_on(Arc::new(Host), &options_of(dir))
}

/// Checks that the store has all pages of the fixture but the deleted pages, with every byte.
fn check_pages(dir: &Path, open: &Open) {
    for Pages { scope, keys, deleted } in contents() {
        let present = open.store.exists(&scope, &refs(&keys)).unwrap();
        for (at, present) in present.into_iter().enumerate() {
            assert_eq!(present, !deleted.contains(&at), "page {at} of {}", scope.model);
        }
    }
    check_bytes(dir, open);
}

/// Reads every page of the fixture except the deleted pages, and compares every byte.
fn check_bytes(dir: &Path, open: &Open) {
    let lossy = fs::read_to_string(dir.join("lossy")).unwrap();
    let lossy: HashMap<&str, &str> =
        lossy.lines().map(|line| line.split_once(' ').unwrap()).collect();
    for Pages { scope, keys, deleted } in contents() {
        let (ok, pages) = get_content(&open.store, &scope, &keys);
        let sums: Vec<String> =
            pages.iter().map(|page| format!("{:016x}", checksum(page))).collect();
        for (at, key) in keys.iter().enumerate().filter(|(at, _)| !deleted.contains(at)) {
            assert!(ok[at], "page {at} of {}", scope.model);
            let same = is_lossy(&scope) || pages[at] == content(&scope, key);
            assert!(same, "WRONG BYTES for page {at} of {}", scope.model);
        }
        if is_lossy(&scope) {
            assert_eq!(sums.join(" "), lossy[scope.model.as_str()], "{}", scope.model);
        }
    }
}

#[test]
fn format_1_store_opens_with_every_byte() {
    let dir = unpacked("v1.tar.gz");
    let open = try_open(dir.path()).unwrap();
    check_pages(dir.path(), &open);
    let report = open.core.verify(false, &mut |_, _| {}).unwrap();
    let pages: usize = contents().iter().map(|part| part.keys.len() - part.deleted.len()).sum();
    assert_eq!((report.pages, report.findings.len()), (pages as u64, 0));
    let stats = open.store.stats().unwrap().catalog;
    assert_eq!((stats.pages, stats.quarantined_bytes), (pages as u64, 0));
    assert!(stats.retained_bytes >= 2 * 5000, "{}", stats.retained_bytes);
    let retained = contents()[6].scope.id().to_string();
    let usage = stats.largest_scopes.iter().find(|usage| usage.id == retained).unwrap();
    assert_eq!((usage.quota_bytes, usage.retained_bytes_max), (Some(QUOTA), QUOTA / 2));
    let dropped = ritornello_format::Scope::opaque(DROPPED, 4096, true);
    assert_eq!(open.store.probe(&dropped, &refs(&sequence(11, 1))).unwrap(), 0);
    let volumes = open.core.manifest().volumes.clone();
    assert_eq!(
        volumes.iter().map(|volume| volume.is_retired()).collect::<Vec<_>>(),
        [true, false, false]
    );
    // Put further pages, and open the store again.
    let more = sequence(20, 4);
    assert_eq!(put(&open.store, &chained(9_000), &more, None).pages, 4);
    let keys = sequence(1, 5);
    let grown = [keys.clone(), vec![vec![77; 16]]].concat();
    assert_eq!(put(&open.store, &chained(9_000), &grown[5..], Some(&keys[4])).pages, 1);
    open.store.flush().unwrap();
    open.close();
    let open = try_open(dir.path()).unwrap();
    check_pages(dir.path(), &open);
    assert_eq!(get(&open.store, &chained(9_000), &more).pages, 4);
    assert_eq!(open.store.probe(&chained(9_000), &refs(&grown)).unwrap(), 6);
    open.close();
}

#[test]
fn format_1_store_holds_every_kind_of_file_and_slice() {
    let dir = unpacked("v1.tar.gz");
    let store = dir.path().join("store");
    let files = |of: &str| {
        let names = fs::read_dir(store.join(of)).unwrap().flatten();
        names.map(|name| name.file_name().into_string().unwrap()).collect::<BTreeSet<_>>()
    };
    let home = files(".");
    for name in ["MANIFEST", "MANIFEST.copy", "SCOPES", "RESERVATIONS"] {
        assert!(home.contains(name), "{name}");
    }
    assert!(files("b").contains("VOLUME") && files("c").contains("VOLUME"));
    assert!(!store.join("a").exists() || files("a").is_empty());
    let index = files("index");
    assert!(index.iter().any(|name| name.starts_with("checkpoint-")), "{index:?}");
    let journal = index.iter().rfind(|name| name.starts_with("journal-")).unwrap();
    assert!(fs::metadata(store.join("index").join(journal)).unwrap().len() > 100, "empty journal");
    assert!(fs::metadata(store.join("RESERVATIONS")).unwrap().len() > 80, "empty log");

    let (mut codecs, mut extents, mut slices) = (BTreeSet::new(), 0, 0);
    let (mut parents, mut keys) = (BTreeSet::new(), BTreeSet::new());
    for volume in ["b", "c"] {
        for name in files(volume).iter().filter(|name| name.starts_with("seg-")) {
            let bytes = fs::read(store.join(volume).join(name)).unwrap();
            for at in (0..bytes.len()).step_by(UNIT as usize) {
                let Ok((header, _)) = RunHeader::decode(&bytes[at..]) else { continue };
                codecs.extend(header.slices.iter().map(|slice| slice.codec));
                extents = extents.max(header.extents.len());
                slices = slices.max(header.slices_per_page);
                parents.insert(header.parent.is_some());
                keys.extend(header.keys.iter().map(<[u8]>::len));
            }
        }
    }
    assert_eq!(codecs.into_iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert!(extents > 2 && slices > 1, "{extents} extents, {slices} slices");
    assert_eq!(parents.len(), 2);
    assert!(keys.contains(&8) && keys.contains(&64), "{keys:?}");
}

/// The fixture's volumes are inside the store, so no volume has copies of the manifest and the
/// scopes. The copies have the bytes of these files: a store whose volumes are moved out of its
/// directory, with the files as their copies, is restored after this directory is lost.
#[test]
fn format_1_copies_in_volumes_restore_the_store() {
    let dir = unpacked("v1.tar.gz");
    let store = dir.path().join("store");
    let files = ["MANIFEST", "SCOPES"].map(|name| fs::read(store.join(name)).unwrap());
    let lost = Manifest::decode(&files[0]).unwrap();
    let scopes = ScopeRegistry::decode(&files[1]).unwrap().registry.scopes.len();
    let volumes = ["b", "c"].map(|name| dir.path().join(name));
    for volume in &volumes {
        fs::rename(store.join(volume.file_name().unwrap()), volume).unwrap();
        for (name, bytes) in ["VOLUME.manifest", "VOLUME.scopes"].iter().zip(&files) {
            assert!(VOLUME_COPIES.contains(name), "{name}");
            fs::write(volume.join(name), bytes).unwrap();
        }
    }
    fs::remove_dir_all(&store).unwrap();
    let medium: Arc<dyn Medium> = Arc::new(Host);
    let plan = Restore::plan(&medium, &store, &volumes).unwrap();
    let restored = plan.run(&mut |_, _| ()).unwrap();
    assert_eq!((restored.scopes, restored.absent), (scopes as u64, Vec::new()));
    let manifest = Manifest::decode(&fs::read(store.join("MANIFEST")).unwrap()).unwrap();
    assert_eq!((manifest.uuid, manifest.owner_epoch), (lost.uuid, lost.owner_epoch + 65_536));
    let open = try_open(dir.path()).unwrap();
    check_bytes(dir.path(), &open);
    let dropped = ritornello_format::Scope::opaque(DROPPED, 4096, true);
    assert_eq!(open.store.probe(&dropped, &refs(&sequence(11, 1))).unwrap(), 0);
    open.close();
}

/// The space of a reservation is withheld while its client lives, and is freed after its client
/// died.
#[test]
fn format_1_reservation_is_withheld_from_others() {
    for lives in [true, false] {
        let dir = unpacked("v1.tar.gz");
        let alive = Arc::new(move |name: &str| lives && name == CLIENT);
        let open = open_beside(Arc::new(Host), &options_of(dir.path()), alive).unwrap();
        let reserved = || open.store.stats().unwrap().catalog.reserved_bytes;
        open.core.run_once();
        // The space of a dead client is drained in the background.
        let until = Instant::now() + Duration::from_secs(60);
        while !lives && reserved() > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
            open.core.run_once();
        }
        assert_eq!(reserved() > 0, lives, "{}", reserved());
        if lives {
            let client = open.core.catalog_for(ClientId(3), CLIENT);
            assert!(client.stats().unwrap().reserved_bytes > 0);
        }
        open.close();
    }
}

#[test]
fn format_1_residency_opens_with_its_holders() {
    let dir = unpacked("v1.tar.gz");
    let residency = open_residency(&dir.path().join("residency"));
    let (scope, pages) = (ScopeSlot(1), hashes(6));
    let holder = |worker, tier: Tier| Holder { worker: Worker(worker), tiers: Tiers::from(tier) };
    for (at, page) in pages.iter().enumerate() {
        let mut expected = vec![holder(1, Tier::Device)];
        expected.truncate(usize::from(at < 4));
        expected.push(holder(2, if at < 3 { Tier::Disk } else { Tier::Remote }));
        assert_eq!(residency.holders(scope, *page), expected, "page {at}");
        assert_eq!(residency.holders(ScopeSlot(2), *page), []);
    }
    residency.put(scope, Worker(5), Tier::Host, None, &pages).unwrap();
    residency.sync().unwrap();
}

fn refused(opened: Result<Open, Error>, what: &str) {
    let error = opened.map(Open::close).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    let both = format!("this {what} is of format 0, and this Ritornello reads format 1: ");
    assert!(error.to_string().contains(&both), "{error}");
    assert!(error.to_string().contains("a new directory"), "{error}");
}

#[test]
fn format_0_store_is_refused_and_not_changed() {
    let dir = unpacked("v0.tar.gz");
    let before = fs::read(dir.path().join("store/MANIFEST")).unwrap();
    refused(try_open(dir.path()), "store");
    refused(open_on(Arc::new(Host), &fixture_options(&dir.path().join("store"))), "store");
    assert_eq!(fs::read(dir.path().join("store/MANIFEST")).unwrap(), before);
    let residency = ritornello_index::residency::RunResidency::open(
        Arc::new(Host),
        &dir.path().join("residency"),
        ritornello_index::residency::RunResidencyOptions::default(),
    );
    let error = residency.map(drop).unwrap_err();
    assert!(error.to_string().contains("this residency log is of format 0, and"), "{error}");
}

/// One file at a time of a store of format 1 is replaced by a file of format 0.
#[test]
fn format_0_files_are_refused_one_by_one() {
    let old = unpacked("v0.tar.gz");
    let replaced = |name: &str| {
        let dir = unpacked("v1.tar.gz");
        fs::copy(old.path().join("store").join(name), dir.path().join("store").join(name)).unwrap();
        let opened = try_open(dir.path());
        (dir, opened)
    };
    refused(replaced("MANIFEST").1, "store");
    refused(replaced("SCOPES").1, "scope registry");
    let index = fs::read_dir(old.path().join("store/index")).unwrap().flatten();
    let names: Vec<String> = index.map(|name| name.file_name().into_string().unwrap()).collect();
    for (kind, what) in [("checkpoint-", "checkpoint"), ("journal-", "journal")] {
        let name = names.iter().find(|name| name.starts_with(kind)).unwrap();
        refused(replaced(&format!("index/{name}")).1, what);
    }
    // A volume whose marker has format 0 is absent, with a reason in the statistics; the rest of
    // the store opens.
    let (dir, opened) = replaced("b/VOLUME");
    let open = opened.unwrap();
    let paths = open.store.stats().unwrap().catalog.paths;
    let why = format!("{paths:?}");
    assert!(why.contains("this volume marker is of format 0, and this Ritornello reads"), "{why}");
    open.close();
    let marker = |dir: &Path| fs::read(dir.join("store/b/VOLUME")).unwrap();
    assert_eq!(marker(dir.path()), marker(old.path()), "the directory must not be changed");
}

/// Scopes whose ids follow another version of the scope identity are dropped with all pages,
/// because no page verifies under this build's ids. No page counts as damaged, and no space is
/// withheld.
#[test]
fn scopes_with_other_ids_are_dropped() {
    let dir = unpacked("v1.tar.gz");
    let file = dir.path().join("store/SCOPES");
    let mut bytes = fs::read(&file).unwrap();
    // Byte 20 begins the body, and is the version of the scope identity.
    let end = 20 + u32::from_le_bytes(bytes[16..20].try_into().unwrap()) as usize;
    bytes[20] += 1;
    let sum = checksum(&bytes[..end]).to_le_bytes();
    bytes[end..end + 8].copy_from_slice(&sum);
    fs::write(&file, bytes).unwrap();
    let open = try_open(dir.path()).unwrap();
    let scope = chained(9_000);
    assert_eq!(get(&open.store, &scope, &sequence(1, 5)).pages, 0);
    let report = open.core.verify(false, &mut |_, _| {}).unwrap();
    assert_eq!((report.pages, report.findings.len()), (0, 0));
    let stats = open.store.stats().unwrap().catalog;
    assert_eq!((stats.scopes, stats.pages, stats.quarantined_bytes), (0, 0, 0));
    assert_eq!(put(&open.store, &scope, &sequence(1, 5), None).pages, 5);
    assert_eq!(get(&open.store, &scope, &sequence(1, 5)).pages, 5);
    open.close();
}
