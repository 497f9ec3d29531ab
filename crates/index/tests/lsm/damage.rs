//! Opening a damaged database of the index `lsm` repairs it or drops it, and reports the damage.

use super::chains::{SCOPE, insert};
use super::{fill, open};
use ritornello_format::ErrorKind;
use ritornello_index::conformance::{contents, pages};
use ritornello_index::{LsmIndex, PrefixIndex};
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Returns the files of the database whose paths contain `ending`.
fn files(dir: &Path, ending: &str) -> Vec<std::path::PathBuf> {
    let entries = fs::read_dir(dir.join("lsm")).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> =
        entries.filter(|path| path.to_string_lossy().contains(ending)).collect();
    files.sort();
    files
}

#[test]
fn damaged_database_is_repaired_or_dropped() {
    type Break = fn(&Path);
    let flip: Break = |path| {
        let mut bytes = fs::read(path).unwrap();
        for at in (0..bytes.len()).step_by(997) {
            bytes[at] ^= 0x55;
        }
        fs::write(path, bytes).unwrap();
    };
    let cut: Break = |path| {
        let length = fs::metadata(path).unwrap().len();
        fs::OpenOptions::new().write(true).open(path).unwrap().set_len(length / 2).unwrap();
    };
    let lose: Break = |path| fs::remove_file(path).unwrap();
    let mut repaired = 0;
    let breaks: [(&str, &[Break]); 5] = [
        (".sst", &[flip, cut, lose]),
        ("MANIFEST", &[flip, lose]),
        ("CURRENT", &[cut, lose]),
        (".log", &[flip]),
        ("", &[flip]),
    ];
    for (ending, breaks) in breaks {
        for damage in breaks {
            let dir = tempfile::tempdir().unwrap();
            let index = open(dir.path());
            fill(&index, 0..300);
            let before = contents(&index);
            drop(index);
            let index = open(dir.path());
            fill(&index, 300..310);
            index.sync().unwrap();
            drop(index);
            let broken = files(dir.path(), ending);
            let broken: Vec<_> = match ending {
                // Damage every second table, and all files of any other kind.
                ".sst" => broken.iter().step_by(2).collect(),
                _ => broken.iter().collect(),
            };
            broken.into_iter().for_each(|path| damage(path));
            let check = |index: &LsmIndex| {
                for (generation, content) in contents(index) {
                    if let Some(then) = before.get(&generation) {
                        assert_eq!(&content, then, "{ending}");
                    } else {
                        assert!(generation > 900, "{ending}");
                    }
                }
                for family in 0..310 {
                    let keys = pages(family, 15);
                    let walk = index.walk(SCOPE, &keys);
                    for step in walk {
                        let view = index.run(step.run).unwrap();
                        let from = step.first as usize;
                        let named = &keys[step.at as usize..][..step.pages as usize];
                        assert_eq!(&view.pages[from..][..named.len()], named);
                    }
                }
            };
            let mut index = open(dir.path());
            // A read may be the first to find damage. Such a read marks the damage, and the next
            // open repairs it.
            let mut found = std::collections::BTreeMap::new();
            index.for_each(&mut |_, view| drop(found.insert(view.place.generation, view)));
            for family in 0..310 {
                index.exists(SCOPE, &pages(family, 15));
            }
            if index.sync().is_err() || insert(&index, 1 << 40, None, &pages(1 << 20, 2)).is_err() {
                assert_eq!(index.sync().unwrap_err().kind(), ErrorKind::Fatal);
                drop(index);
                index = open(dir.path());
                assert!(index.recovered().damaged);
            } else {
                index.remove(SCOPE, &pages(1 << 20, 2));
            }
            repaired += u64::from(index.recovered().damaged);
            check(&index);
            fill(&index, 5000..5010);
            index.sync().unwrap();
            drop(index);
            let index = open(dir.path());
            assert!(!index.recovered().damaged, "one recovery must repair the damage");
            assert_eq!(index.probe(SCOPE, &pages(5009, 15)), 15);
        }
    }
    assert!(repaired > 5, "{repaired}");
}

/// RocksDB never shortens its lock file and the files of its identity, messages and options, and
/// the bytes of all files count towards the budget. The open truncates or removes such files if
/// they are too long.
#[test]
fn overlong_files_do_not_take_budget() {
    const LENGTH: u64 = 8 << 20;
    let dir = tempfile::tempdir().unwrap();
    fill(&open(dir.path()), 0..300);
    let before = contents(&open(dir.path()));
    for name in ["LOCK", "IDENTITY", "LOG", "OPTIONS-"] {
        let found = files(dir.path(), &format!("lsm/{name}"));
        assert!(!found.is_empty(), "{name}");
        for path in found {
            fs::write(path, vec![7; LENGTH as usize]).unwrap();
        }
    }
    let index = open(dir.path());
    assert!(index.stats().disk_bytes < LENGTH);
    assert_eq!(contents(&index), before);
}

/// RocksDB reads a manifest that lost its end as the manifest of an older database, without some
/// families or tables, and deletes the tables that the shortened manifest does not name.
#[test]
fn truncated_manifest_is_damage() {
    let dir = tempfile::tempdir().unwrap();
    let index = open(dir.path());
    fill(&index, 0..20);
    let before = contents(&index);
    index.sync().unwrap();
    drop(index);
    // Copies the files of the database, and cuts the copied manifest to `cut` bytes.
    let copy_to = |to: &Path, cut: u64| {
        fs::create_dir(to.join("lsm")).unwrap();
        fs::copy(dir.path().join("lsm.seal"), to.join("lsm.seal")).unwrap();
        for file in files(dir.path(), "") {
            fs::copy(&file, to.join("lsm").join(file.file_name().unwrap())).unwrap();
        }
        let list = files(to, "MANIFEST").pop().unwrap();
        fs::OpenOptions::new().write(true).open(list).unwrap().set_len(cut).unwrap();
    };
    let length = fs::metadata(files(dir.path(), "MANIFEST").pop().unwrap()).unwrap().len();
    let listing = tempfile::tempdir().unwrap();
    copy_to(listing.path(), length);
    let mut families = std::collections::BTreeSet::new();
    // Shorten the manifest in steps of 16 bytes. Test each length at which the manifest lists a new
    // number of column families, and besides one length in each 256 bytes.
    for cut in (0..length).rev().step_by(16) {
        let list = files(listing.path(), "MANIFEST").pop().unwrap();
        fs::OpenOptions::new().write(true).open(list).unwrap().set_len(cut).unwrap();
        let listed = rocksdb::DB::list_cf(&rocksdb::Options::default(), listing.path().join("lsm"));
        if !families.insert(listed.map_or(0, |families| families.len())) && cut % 256 >= 16 {
            continue;
        }
        for is_sealed in [true, false] {
            let copy = tempfile::tempdir().unwrap();
            copy_to(copy.path(), cut);
            if !is_sealed {
                fs::remove_file(copy.path().join("lsm.seal")).unwrap();
            }
            let index = open(copy.path());
            let found = contents(&index);
            if is_sealed {
                assert!(index.recovered().damaged, "cut at {cut} of {length}");
                assert_eq!(found, before, "cut at {cut} of {length}");
            } else {
                assert!(found.iter().all(|(generation, run)| before[generation] == *run));
            }
            // Removing a page removes its descendants, which can then be inserted again.
            let keys = pages(7, 15);
            let found = index.probe(SCOPE, &keys);
            index.remove(SCOPE, &&keys[4..5]);
            let stay = index.exists(SCOPE, &keys).into_iter().filter(|present| *present).count();
            assert_eq!(stay, found.min(4), "cut at {cut} of {length}");
            index.remove(SCOPE, &keys);
            insert(&index, 1 << 40, None, &keys).unwrap();
            assert_eq!(index.probe(SCOPE, &keys), 15);
            index.sync().unwrap();
            drop(index);
            let index = open(copy.path());
            assert!(!index.recovered().damaged, "one recovery must repair the damage");
            assert_eq!(index.probe(SCOPE, &keys), 15);
        }
    }
    assert!(
        families.len() > 5,
        "the cuts must leave manifests that list different numbers of families: {families:?}"
    );
}

/// Returns the offset of each record's type byte in the first block, 32 KiB, of a manifest or log.
fn types_of_records(file: &Path) -> Vec<usize> {
    let bytes = fs::read(file).unwrap();
    let mut at = 0;
    let mut types = Vec::new();
    while at + 7 <= bytes.len().min(32 << 10) && bytes[at + 6] != 0 {
        types.push(at + 6);
        at += 7 + usize::from(u16::from_le_bytes([bytes[at + 4], bytes[at + 5]]));
    }
    types
}

/// The damage turns a record into a record of a recycled log. In a file that is not recycled
/// RocksDB would read such a record again and again, so the open finds it before RocksDB reads the
/// file.
#[test]
fn record_of_recycled_log_does_not_block_opening() {
    let dir = tempfile::tempdir().unwrap();
    let index = open(dir.path());
    fill(&index, 0..20);
    index.sync().unwrap();
    let before = contents(&index);
    let copy_to = |to: &Path| {
        fs::create_dir(to.join("lsm")).unwrap();
        for file in files(dir.path(), "") {
            fs::copy(&file, to.join("lsm").join(file.file_name().unwrap())).unwrap();
        }
    };
    let damaged = |name: &str, record: usize, bit: u8| {
        let copy = tempfile::tempdir().unwrap();
        copy_to(copy.path());
        let file = files(copy.path(), name).pop().unwrap();
        let mut bytes = fs::read(&file).unwrap();
        bytes[types_of_records(&file)[record]] ^= bit;
        fs::write(&file, bytes).unwrap();
        let (done, opened) = std::sync::mpsc::channel();
        std::thread::spawn(move || drop(done.send((open(copy.path()), copy))));
        opened.recv_timeout(std::time::Duration::from_secs(60)).unwrap()
    };
    let logged = files(dir.path(), ".log").into_iter().map(|log| types_of_records(&log).len());
    let logged = logged.max().unwrap();
    assert!(logged > 2, "the log must have more than two records");
    for record in [0, 1, logged - 1] {
        let (index, _copy) = damaged(".log", record, 4);
        assert!(index.recovered().damaged, "record {record} of {logged} in the log");
        let found = contents(&index);
        assert!(found.iter().all(|(generation, run)| before[generation] == *run));
        assert!(found.len() <= before.len());
    }
    drop(index);
    let listed = types_of_records(&files(dir.path(), "MANIFEST").pop().unwrap()).len();
    for record in 0..listed {
        for bit in [4, 10] {
            let (index, _copy) = damaged("MANIFEST", record, bit);
            assert!(index.recovered().damaged, "record {record} of {listed}");
            assert_eq!(contents(&index), before, "record {record} of {listed}");
        }
    }
}

#[test]
fn intact_database_marked_as_damaged_is_copied_whole() {
    let dir = tempfile::tempdir().unwrap();
    let index = open(dir.path());
    fill(&index, 0..300);
    drop(index);
    fs::write(dir.path().join("lsm.damaged"), b"").unwrap();
    let index = open(dir.path());
    let recovered = index.recovered();
    assert!(recovered.damaged);
    assert_eq!((recovered.saved_runs, recovered.dropped_runs), (900, 0));
    assert_eq!(index.stats().pages, 4500);
    assert_eq!(contents(&index).len(), 900);
}

fn copy_files(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_files(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

/// Models a failed sync of the log, or of log and manifest, after which reads still return bytes
/// that never reached the disk. `on_disk` holds the disk's versions of these files, `cached` the
/// versions that reads return. Tables are equal in both, because RocksDB syncs a table before the
/// manifest names it. Checks that after an open and a sync no page of the index depends on the
/// cached versions.
fn check_dropped_pages(root: &Path, on_disk: &Path, cached: &Path) {
    let database = cached.join("lsm");
    // Keep the old files open, so that no new file gets the inode number of an old file.
    let files = fs::read_dir(&database).unwrap().map(|entry| File::open(entry.unwrap().path()));
    let held: Vec<File> = files.map(Result::unwrap).collect();
    let old: Vec<u64> = held.iter().map(|file| file.metadata().unwrap().ino()).collect();

    let index = open(cached);
    assert!(!index.recovered().damaged);
    fill(&index, 40..60);
    index.sync().unwrap();

    let left = root.join("left");
    copy_files(cached, &left);
    for entry in fs::read_dir(&database).unwrap() {
        let entry = entry.unwrap();
        let name = Path::new("lsm").join(entry.file_name());
        let is_table = name.extension().is_some_and(|kind| kind == "sst");
        if is_table || !old.contains(&entry.metadata().unwrap().ino()) {
            continue;
        }
        if fs::copy(on_disk.join(&name), left.join(&name)).is_err() {
            fs::remove_file(left.join(&name)).unwrap();
        }
    }
    drop(held);
    let index = open(&left);
    assert!(!index.recovered().damaged);
    for family in 0..60 {
        assert_eq!(index.probe(SCOPE, &pages(family, 15)), 15, "family {family}");
    }
}

#[test]
fn data_dropped_by_failed_sync_is_rewritten_at_open() {
    for closed in [false, true] {
        let root = tempfile::tempdir().unwrap();
        let [dir, on_disk, cached] = ["index", "disk", "cache"].map(|name| root.path().join(name));
        let index = open(&dir);
        fill(&index, 0..20);
        index.sync().unwrap();
        copy_files(&dir, &on_disk);
        fill(&index, 20..40);
        index.sync().unwrap();
        if closed {
            // The close writes tables, and a manifest that names them.
            drop(index);
            copy_files(&dir, &cached);
        } else {
            copy_files(&dir, &cached);
        }
        check_dropped_pages(root.path(), &on_disk, &cached);
    }
}
