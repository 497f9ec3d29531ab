use super::*;
use std::collections::BTreeSet;

const WRITE: Access = Access { write: true, create: true, direct: false };
/// Seeds of crashes.
fn seeds() -> std::ops::Range<u64> {
    0..200
}

fn disk() -> SimDisk {
    let disk = SimDisk::new(1 << 20);
    disk.create_dir(Path::new("/s/v")).unwrap();
    disk.sync_dir(Path::new("/s/v")).unwrap();
    disk
}

fn put(disk: &SimDisk, path: &str, bytes: &[u8]) -> Arc<dyn MediumFile> {
    let file = disk.open(Path::new(path), WRITE).unwrap();
    file.write_at(bytes, 0).unwrap();
    file
}

fn get(disk: &SimDisk, path: &str) -> Option<Vec<u8>> {
    let file = disk.open(Path::new(path), Access::default()).ok()?;
    let mut bytes = vec![0; file.length().unwrap() as usize];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), bytes.len());
    Some(bytes)
}

#[test]
fn synced_data_survives_every_crash() {
    let disk = disk();
    put(&disk, "/s/v/a", b"contents").sync_data().unwrap();
    disk.sync_dir(Path::new("/s/v")).unwrap();
    assert_eq!(disk.unsynced(), 0);
    for seed in seeds() {
        let after = disk.crash(seed);
        assert_eq!(get(&after, "/s/v/a").unwrap(), b"contents");
        assert_eq!(get(&after.crash(seed), "/s/v/a").unwrap(), b"contents");
    }
}

#[test]
fn names_and_contents_need_separate_syncs() {
    let disk = disk();
    put(&disk, "/s/v/a", b"xx").sync_data().unwrap();
    let seen: BTreeSet<_> = seeds().map(|seed| get(&disk.crash(seed), "/s/v/a")).collect();
    assert_eq!(seen, [None, Some(b"xx".to_vec())].into());

    disk.sync_dir(Path::new("/s/v")).unwrap();
    put(&disk, "/s/v/a", b"yy");
    let seen: BTreeSet<_> = seeds().map(|seed| get(&disk.crash(seed), "/s/v/a").unwrap()).collect();
    assert_eq!(seen, [b"xx".to_vec(), b"yy".to_vec()].into());
}

#[test]
fn a_rename_is_atomic() {
    let disk = disk();
    put(&disk, "/s/v/a", b"old").sync_data().unwrap();
    put(&disk, "/s/v/b", b"new").sync_data().unwrap();
    disk.sync_dir(Path::new("/s/v")).unwrap();
    disk.rename(Path::new("/s/v/b"), Path::new("/s/v/a")).unwrap();
    let mut seen = BTreeSet::new();
    for seed in seeds() {
        let after = disk.crash(seed);
        seen.insert((get(&after, "/s/v/a").unwrap(), get(&after, "/s/v/b")));
    }
    let before = (b"old".to_vec(), Some(b"new".to_vec()));
    assert_eq!(seen, [before, (b"new".to_vec(), None)].into());
    disk.sync_dir(Path::new("/s/v")).unwrap();
    assert!(seeds().all(|seed| get(&disk.crash(seed), "/s/v/a").unwrap() == b"new"));
}

#[test]
fn unsynced_writes_are_kept_lost_and_torn() {
    let disk = disk();
    let file = put(&disk, "/s/v/a", &[1; 8192]);
    file.sync_data().unwrap();
    disk.sync_dir(Path::new("/s/v")).unwrap();
    file.write_at(&[2; 8192], 0).unwrap();
    file.write_at(&[3; 512], 8192).unwrap();
    let (mut kept, mut lost, mut torn) = (0, 0, 0);
    for seed in seeds() {
        let bytes = get(&disk.crash(seed), "/s/v/a").unwrap();
        assert!(bytes.len() == 8192 || bytes.len() == 8704);
        for sector in bytes.chunks(512) {
            assert!(sector.iter().all(|byte| *byte == sector[0]), "a sector was torn");
        }
        for block in bytes[..8192].chunks(4096) {
            let new = block.iter().filter(|byte| **byte == 2).count();
            match new {
                0 => lost += 1,
                4096 => kept += 1,
                _ => torn += 1,
            }
        }
    }
    assert!(kept > 50 && lost > 50 && torn > 20, "kept {kept}, lost {lost}, torn {torn}");
    let images = |seed| get(&disk.crash(seed), "/s/v/a");
    assert!(
        seeds().all(|seed| images(seed) == images(seed)),
        "equal seeds must give equal crashes"
    );
}

#[test]
fn unsynced_removal_may_be_undone() {
    let disk = disk();
    let file = put(&disk, "/s/v/a", b"x");
    file.sync_data().unwrap();
    disk.sync_dir(Path::new("/s/v")).unwrap();
    disk.remove(Path::new("/s/v/a")).unwrap();
    assert!(file.write_at(b"still open", 0).is_ok());
    assert!(disk.open(Path::new("/s/v/a"), Access::default()).is_err());
    let back = seeds().filter(|seed| get(&disk.crash(*seed), "/s/v/a").is_some()).count();
    assert!(back > 20 && back < 180);
    disk.sync_dir(Path::new("/s/v")).unwrap();
    assert!(seeds().all(|seed| get(&disk.crash(seed), "/s/v/a").is_none()));
}

#[test]
fn space_is_bounded_and_alignment_checked() {
    let disk = disk();
    let file = disk.open(Path::new("/s/v/a"), Access { direct: true, ..WRITE }).unwrap();
    file.allocate(1 << 19).unwrap();
    assert_eq!(file.allocated().unwrap(), 1 << 19);
    assert_eq!(file.length().unwrap(), 1 << 19);
    assert_eq!(disk.room(Path::new("/s")).unwrap().available, 1 << 19);
    assert!(file.write_at(&[0; 100], 0).is_err());
    let other = put(&disk, "/s/v/b", &[0; 4096]);
    assert!(other.allocate((1 << 19) + 4096).is_err());
    assert!(other.write_at(&vec![0; 1 << 19], 4096).is_err());
    other.set_len(10).unwrap();
    other.set_len(4096).unwrap();
    assert_eq!(disk.list(Path::new("/s/v")).unwrap(), ["a", "b"]);
    let read = disk.open(Path::new("/s/v/b"), Access::default()).unwrap();
    assert!(read.write_at(b"x", 0).is_err() && read.allocate(1).is_err());
    assert!(disk.create_dir(Path::new("/s/v/b/c")).is_err());
    assert!(disk.open(Path::new("/t/x"), WRITE).is_err());
}

#[test]
fn lost_directory_has_no_files() {
    let disk = SimDisk::new(1 << 20);
    disk.create_dir(Path::new("/s/v")).unwrap();
    put(&disk, "/s/v/a", b"x").sync_data().unwrap();
    for seed in seeds() {
        let after = disk.crash(seed);
        let dir = after.list(Path::new("/s/v")).is_ok();
        assert!(dir || get(&after, "/s/v/a").is_none());
    }
}

#[test]
fn failed_sync_drops_readable_bytes() {
    let disk = disk();
    let file = put(&disk, "/s/v/a", &[1; 8192]);
    file.sync_data().unwrap();
    put(&disk, "/s/v/b", b"other").sync_data().unwrap();
    disk.sync_dir(Path::new("/s/v")).unwrap();
    let mut seen = BTreeSet::new();
    for seed in seeds() {
        let disk = disk.crash(seed);
        let file = put(&disk, "/s/v/a", &[2; 8192]);
        disk.fail_next_sync("/a", seed);
        put(&disk, "/s/v/b", b"again").sync_data().unwrap();
        assert_eq!(file.sync_data().unwrap_err().raw_os_error(), Some(5));
        assert_eq!(
            get(&disk, "/s/v/a").unwrap(),
            [2; 8192],
            "reads must return the written bytes after a failed sync"
        );
        file.write_at(&[3; 512], 8192).unwrap();
        file.sync_data().unwrap();
        assert_eq!(disk.unsynced(), 0);
        let after = get(&disk.crash(seed), "/s/v/a").unwrap();
        assert_eq!(
            after,
            get(&disk.crash(seed + 1), "/s/v/a").unwrap(),
            "the failed sync, not the crash, decides which bytes are on the disk"
        );
        assert_eq!(
            (after.len(), after[8192]),
            (8704, 3),
            "writes after the failed sync must be durable"
        );
        seen.insert((after[0], after[4096]));
    }
    assert_eq!(seen, [(1, 1), (1, 2), (2, 1), (2, 2)].into());
}

mod flight;
mod mounts;
