//! Kills with writes in flight.

use super::*;

fn is_segment(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "seg")
}

/// A disk with a durable file of 16 KiB whose bytes are all 1.
fn disk_with_file() -> (SimDisk, SimProcess, Arc<dyn MediumFile>) {
    let disk = disk();
    let process = disk.process(is_segment);
    let file = process.open(Path::new("/s/v/a.seg"), WRITE).unwrap();
    file.write_at(&[1; 16384], 0).unwrap();
    file.sync_data().unwrap();
    process.sync_dir(Path::new("/s/v")).unwrap();
    (disk, process, file)
}

/// Kills a process so that its next write completes and the two writes after it stay in flight.
/// Returns the disk and the file of the dead process.
fn kill_with_two_in_flight() -> (SimDisk, Arc<dyn MediumFile>) {
    let (disk, process, file) = disk_with_file();
    process.kill(1, 2);
    file.write_at(&[2; 4096], 0).unwrap();
    assert!(!process.is_dead());
    file.write_at(&[3; 8192], 0).unwrap();
    file.write_at(&[4; 4096], 12288).unwrap();
    assert!(process.is_dead());
    assert!(file.write_at(&[5; 4096], 0).is_err() && file.sync_data().is_err());
    (disk, file)
}

#[test]
fn writes_in_flight_land_after_the_kill() {
    let (disk, _) = kill_with_two_in_flight();
    let before = get(&disk, "/s/v/a.seg").unwrap();
    assert_eq!([before[0], before[4096], before[12288]], [2, 1, 1]);
    assert_eq!(disk.in_flight(), 2);
    let mut seen = BTreeSet::new();
    for seed in seeds() {
        disk.land(seed);
        let now = get(&disk, "/s/v/a.seg").unwrap();
        seen.insert([now[0], now[4096], now[12288]]);
    }
    assert_eq!(disk.in_flight(), 0);
    assert_eq!(seen.last(), Some(&[3, 3, 4]));
}

#[test]
fn writes_in_flight_land_in_any_subset_and_order() {
    let mut seen = BTreeSet::new();
    for seed in seeds() {
        let (disk, process, file) = disk_with_file();
        process.kill(0, 2);
        file.write_at(&[2; 8192], 0).unwrap();
        file.write_at(&[3; 4096], 0).unwrap();
        disk.land(seed);
        let now = get(&disk, "/s/v/a.seg").unwrap();
        seen.insert([now[0], now[512], now[4096]]);
    }
    for expected in [[1, 1, 1], [2, 2, 2], [3, 3, 1], [3, 3, 2], [1, 1, 2], [2, 1, 2]] {
        assert!(seen.contains(&expected), "{expected:?} is not among {seen:?}");
    }
}

#[test]
fn draining_a_file_lands_its_writes() {
    let (disk, _) = kill_with_two_in_flight();
    let other = put(&disk, "/s/v/b.seg", b"x");
    other.drain().unwrap();
    assert_eq!(disk.in_flight(), 2);
    disk.open(Path::new("/s/v/a.seg"), WRITE).unwrap().drain().unwrap();
    let now = get(&disk, "/s/v/a.seg").unwrap();
    assert_eq!([now[0], now[4096], now[8192], now[12288]], [3, 3, 1, 4]);
    assert_eq!(disk.in_flight(), 0);
}

#[test]
fn sync_ignores_writes_in_flight() {
    let (disk, _) = kill_with_two_in_flight();
    let file = disk.open(Path::new("/s/v/a.seg"), WRITE).unwrap();
    file.sync_data().unwrap();
    assert_eq!(disk.in_flight(), 2);
    // A write in flight lands over data that was written and synced after the write began.
    file.write_at(&[9; 4096], 12288).unwrap();
    file.sync_data().unwrap();
    file.drain().unwrap();
    assert_eq!(get(&disk, "/s/v/a.seg").unwrap()[12288], 4);
    let (mut kept, mut lost) = (0, 0);
    for seed in seeds() {
        match get(&disk.crash(seed), "/s/v/a.seg").unwrap()[12288] {
            4 => kept += 1,
            9 => lost += 1,
            byte => panic!("{byte} was never written"),
        }
    }
    assert!(kept > 50 && lost > 50, "kept {kept}, lost {lost}");
}

#[test]
fn writes_in_flight_land_or_are_lost_at_power_loss() {
    let (disk, _) = kill_with_two_in_flight();
    let mut seen = BTreeSet::new();
    for seed in seeds() {
        let after = disk.crash(seed);
        assert_eq!(after.in_flight(), 0);
        seen.insert(get(&after, "/s/v/a.seg").unwrap()[12288]);
    }
    assert_eq!(seen, [1, 4].into());
}

#[test]
fn truncation_waits_for_writes_in_flight() {
    let (disk, _) = kill_with_two_in_flight();
    disk.open(Path::new("/s/v/a.seg"), WRITE).unwrap().set_len(0).unwrap();
    assert_eq!((disk.in_flight(), get(&disk, "/s/v/a.seg").unwrap().len()), (0, 0));
}

#[test]
fn only_asynchronous_writes_outlive_the_process() {
    let (disk, process, file) = disk_with_file();
    let journal = process.open(Path::new("/s/v/journal"), WRITE).unwrap();
    process.kill(0, 2);
    file.write_at(&[2; 4096], 0).unwrap();
    assert!(journal.write_at(b"x", 0).is_err());
    assert!(file.write_at(&[2; 4096], 0).is_err(), "no write may begin after a refused change");
    assert!(process.open(Path::new("/s/v/new"), WRITE).is_err());
    assert_eq!((disk.in_flight(), get(&disk, "/s/v/journal").unwrap().len()), (1, 0));
    let other = disk.process(is_segment);
    other.kill_now();
    assert!(other.is_dead() && other.sync_dir(Path::new("/s/v")).is_err());
}
