//! Damage on disk causes misses, never wrong bytes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;
use common::*;
use proptest::prelude::*;
use ritornello_format::{ErrorKind, Place, RunHeader, SegmentId, Slice, UNIT};
use ritornello_medium::{Faulty, Host, Medium, MediumFault, Op, Rule, Schedule, SimDisk};
use ritornello_volume::*;
use std::os::unix::fs::FileExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

fn verified(outcomes: &[PageOutcome]) -> Vec<bool> {
    outcomes.iter().map(|outcome| outcome.is_verified()).collect()
}

/// Numbers of volumes with which tests run. With several volumes, consecutive pages of a run are on
/// different volumes.
const VOLUMES: [u8; 3] = [1, 2, 4];

/// Returns, for each number of volumes in [`VOLUMES`], the rigs of [`rigs_on`]: one for each I/O
/// mode that works on this machine, and one whose files have no file descriptors.
fn all_rigs() -> impl Iterator<Item = (u8, Rig)> {
    let each = |volumes| rigs_on(volumes).into_iter().map(move |rig| (volumes, rig));
    VOLUMES.into_iter().flat_map(each)
}

/// Changes bytes of a segment file directly, not through the store.
fn corrupt(rig: &Rig, id: SegmentId, offset: u64, change: impl FnOnce(&mut [u8]), length: usize) {
    let mut options = std::fs::OpenOptions::new();
    let file = options.read(true).write(true).open(file_of(rig, id)).unwrap();
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, offset).unwrap();
    change(&mut bytes);
    file.write_all_at(&bytes, offset).unwrap();
    file.sync_all().unwrap();
}

/// Changes `length` bytes of page `page`, starting at byte `from` of the page's first piece.
fn corrupt_page(
    rig: &Rig,
    run: &Run,
    page: u32,
    from: u64,
    change: impl FnOnce(&mut [u8]),
    length: usize,
) {
    let piece = run.place.page(page)[0];
    corrupt(rig, piece.segment, piece.offset() + from, change, length);
}

fn page_on_disk(rig: &Rig, run: &Run, page: u32) -> Vec<u8> {
    let mut found = Vec::new();
    let length = run.place.page(page)[0].bytes() as usize;
    corrupt_page(rig, run, page, 0, |bytes| found.extend_from_slice(bytes), length);
    found
}

#[test]
fn flipped_bit_loses_its_page_or_in_a_header_its_run() {
    for (volumes, rig) in all_rigs() {
        let mut run = Run::over(volumes, 1, 3, 10_000);
        run.write(&rig.segments);
        corrupt_page(&rig, &run, 1, 9_999, |byte| byte[0] ^= 4, 1);
        assert_eq!(
            run.check(&rig.segments),
            [
                PageOutcome::Verified,
                PageOutcome::Missed(MissReason::Checksum),
                PageOutcome::Verified
            ]
        );
        // Damage in padding affects no page.
        corrupt_page(&rig, &run, 0, 10_001, |byte| byte[0] ^= 4, 1);
        assert_eq!(verified(&run.check(&rig.segments)), [true, false, true]);
        let header = run.place.extents[0];
        corrupt(&rig, header.segment, header.offset() + 60, |byte| byte[0] ^= 1, 1);
        assert_eq!(run.check(&rig.segments), [PageOutcome::Missed(MissReason::Header); 3]);
        assert!(rig.segments.read_header(&run.place).is_err());
        assert!(rig.segments.verify_run(&run.place, &Control::default()).is_err());
    }
}

#[test]
fn swapped_pages_miss() {
    for (volumes, rig) in all_rigs() {
        let mut run = Run::over(volumes, 1, 3, 8192);
        run.write(&rig.segments);
        let pages: Vec<Vec<u8>> = (0..3).map(|page| page_on_disk(&rig, &run, page)).collect();
        for page in 0..3 {
            let other = &pages[(page as usize + 1) % 3];
            corrupt_page(&rig, &run, page, 0, |bytes| bytes.copy_from_slice(other), 8192);
        }
        assert_eq!(run.check(&rig.segments), [PageOutcome::Missed(MissReason::Checksum); 3]);
    }
}

#[test]
fn read_of_a_replaced_run_misses() {
    for (volumes, rig) in all_rigs() {
        let mut old = Run::over(volumes, 1, 3, 8192);
        old.write(&rig.segments);
        let stale = page_on_disk(&rig, &old, 1);
        let mut new = Run::over(volumes, 2, 3, 8192);
        new.header.keys = old.header.keys.clone();
        new.write(&rig.segments);
        assert_eq!(old.check(&rig.segments), [PageOutcome::Missed(MissReason::Header); 3]);
        assert_eq!(verified(&new.check(&rig.segments)), [true; 3]);
        // A read misses as well if only the generation, or only the header checksum, of its place
        // is wrong.
        let place = Place { generation: 1, ..new.place.clone() };
        let lies = Run { place, ..new.clone() };
        assert_eq!(lies.check(&rig.segments), [PageOutcome::Missed(MissReason::Header); 3]);
        let place = Place { header_checksum: old.place.header_checksum, ..new.place.clone() };
        let lies = Run { place, ..new.clone() };
        assert_eq!(lies.check(&rig.segments), [PageOutcome::Missed(MissReason::Header); 3]);
        // The disk lost the write of page 1 of the new run, or of half of this page.
        corrupt_page(&rig, &new, 1, 0, |bytes| bytes.copy_from_slice(&stale), 8192);
        assert_eq!(verified(&new.check(&rig.segments)), [true, false, true]);
        new.write(&rig.segments);
        corrupt_page(&rig, &new, 1, 4096, |bytes| bytes.copy_from_slice(&stale[4096..]), 4096);
        assert_eq!(verified(&new.check(&rig.segments)), [true, false, true]);
    }
}

#[test]
fn swapped_segment_files_miss() {
    for (volumes, rig) in all_rigs() {
        let mut run = Run::over(volumes, 1, 8, 8192);
        run.write(&rig.segments);
        let pages = |id: SegmentId| -> Vec<bool> {
            (0..8).map(|page| run.place.page(page)[0].segment == id).collect()
        };
        // On one volume no page is in segment 1.
        let (first, second) = match volumes {
            1 => (SegmentId::new(0, 0), SegmentId::new(0, 1)),
            2 => (SegmentId::new(0, 0), SegmentId::new(1, 1)),
            _ => (SegmentId::new(3, 1), SegmentId::new(1, 1)),
        };
        let (files, between) =
            ([file_of(&rig, first), file_of(&rig, second)], rig.dir.path().join("between"));
        let swap = || {
            std::fs::rename(&files[0], &between).unwrap();
            std::fs::rename(&files[1], &files[0]).unwrap();
            std::fs::rename(&between, &files[1]).unwrap();
            rig.segments.close_all();
        };
        swap();
        let found = verified(&run.check(&rig.segments));
        let is_header_lost = run.place.extents[0].segment == first;
        let expected: Vec<bool> = pages(first)
            .into_iter()
            .zip(pages(second))
            .map(|(first, second)| !is_header_lost && !first && !second)
            .collect();
        assert_eq!(found, expected, "{volumes} volumes");
        swap();
        assert_eq!(verified(&run.check(&rig.segments)), [true; 8]);
    }
}

#[test]
fn other_keys_scopes_and_page_lengths_miss() {
    let rig = rig(IoChoice::Auto);
    let mut run = Run::new(1, 3, 8192, &[]);
    run.write(&rig.segments);
    let mut other = run.clone();
    let mut keys: Vec<Vec<u8>> = run.header.keys.iter().map(<[u8]>::to_vec).collect();
    keys[1][5] ^= 1;
    other.header.keys = keys.iter().collect();
    assert_eq!(
        other.check(&rig.segments),
        [PageOutcome::Verified, PageOutcome::Missed(MissReason::Key), PageOutcome::Verified]
    );
    let mut other = run.clone();
    other.header.page_bytes = 8191;
    other.pages.iter_mut().for_each(|page| page.truncate(8191));
    assert_eq!(other.check(&rig.segments), [PageOutcome::Missed(MissReason::Header); 3]);

    let keys = run.keys();
    let mut out = vec![vec![0; 8192]; 3];
    let mut slices: Vec<&mut [u8]> = out.iter_mut().map(Vec::as_mut_slice).collect();
    let read = RunRead {
        place: &run.place,
        scope: ritornello_format::ScopeId([8; 16]),
        page_bytes: 8192,
        keys: &keys,
        first: 0,
        target: &BorrowedPagesMut::new(&mut slices),
        target_first: 0,
        encoded: Encoded::Refuse,
    };
    let outcomes = rig.segments.read_runs(&[read], &Control::default());
    assert_eq!(outcomes, [vec![PageOutcome::Missed(MissReason::Scope); 3]]);
}

#[test]
fn slices_that_do_not_match_the_keys_are_refused() {
    let rig = rig(IoChoice::Auto);
    let run = Run::new(1, 2, 8192, &[]);
    let slice = Slice { bytes: 8192, codec: Slice::RAW, checksum: 0 };
    for (count, pages) in [(1, vec![vec![0; 8192], Vec::new()]), (3, run.pages.clone())] {
        let header =
            RunHeader { slices_per_page: 1, slices: vec![slice; count], ..run.header.clone() };
        let source = OwnedPages::new(pages);
        let write = RunWrite { place: &run.place, header: &header, source: &source, first: 0 };
        let results = rig.segments.write_runs(&[write], &Control::default());
        assert_eq!(results[0].as_ref().unwrap_err().kind(), ErrorKind::Invalid, "{count} slices");
    }
}

#[test]
fn impossible_places_miss() {
    let rig = rig(IoChoice::Auto);
    let mut run = Run::new(1, 2, 8192, &[]);
    run.write(&rig.segments);
    let lie = |change: &dyn Fn(&mut Place)| {
        let mut run = run.clone();
        change(&mut run.place);
        run.check(&rig.segments)
    };
    let place = [PageOutcome::Missed(MissReason::Place); 2];
    assert_eq!(lie(&|place| place.extents.clear()), place);
    assert_eq!(lie(&|place| place.extents[0].start = u32::MAX), place);
    assert_eq!(lie(&|place| place.extents[0].units = u32::MAX), place);
    assert_eq!(lie(&|place| place.extents[0].segment = SegmentId::new(9, 0)), place);
    assert_eq!(lie(&|place| place.page_units = 0), place);
    assert_eq!(lie(&|place| place.header_units = 200), place);
    let io = [PageOutcome::Missed(MissReason::Io); 2];
    assert_eq!(lie(&|place| place.extents[0].segment = SegmentId::new(0, 77)), io);
}

#[test]
fn truncated_or_zeroed_segment_misses() {
    for (volumes, rig) in all_rigs() {
        let mut run = Run::over(volumes, 1, 3, 300_000);
        run.write(&rig.segments);
        let piece = run.place.page(1)[0];
        let open = |id| std::fs::OpenOptions::new().write(true).open(file_of(&rig, id)).unwrap();
        let file = open(piece.segment);
        file.set_len(piece.offset() + 100).unwrap();
        // On one volume, page 2 is in the truncated segment, after page 1.
        let found = verified(&run.check(&rig.segments));
        assert_eq!(found[1..], [false, volumes > 1], "{volumes} volumes: {found:?}");
        assert!(found[0] || volumes == 1, "{found:?}");
        file.set_len(SEGMENT_BYTES).unwrap();
        assert_eq!(verified(&run.check(&rig.segments)), [true, false, volumes > 1]);

        let id = run.place.extents[0].segment;
        let file = open(id);
        file.set_len(0).unwrap();
        assert!(verified(&run.check(&rig.segments)).iter().all(|hit| !hit));
        file.set_len(SEGMENT_BYTES).unwrap();
        assert_eq!(run.check(&rig.segments), [PageOutcome::Missed(MissReason::Header); 3]);
        let mut found = 0;
        rig.segments.scan_headers(id, &Control::default(), &mut |_| found += 1).unwrap();
        assert_eq!(found, 0);
    }
}

#[test]
fn failed_operation_gives_no_wrong_bytes_and_returns_staging() {
    for io in [IoChoice::Auto, IoChoice::Pool] {
        for fault in [MediumFault::Io, MediumFault::NoSpace, MediumFault::Short, MediumFault::Torn]
        {
            for op in [Op::Read, Op::Write] {
                for nth in 1..6 {
                    let schedule = Schedule::new();
                    let disk = SimDisk::new(64 << 20);
                    let dir = Path::new("/kv");
                    disk.create_dir(dir).unwrap();
                    let faulty = Faulty::new(Arc::new(disk), schedule.clone());
                    let segments = open(Arc::new(faulty), dir.into(), io);
                    segments.create(SegmentId::new(0, 0)).unwrap();
                    segments.create(SegmentId::new(0, 1)).unwrap();
                    let mut run = Run::new(1, 4, 70_000, &[19, 18]);
                    schedule.add(Rule::nth(nth, fault).on(op));
                    let source = OwnedPages::new(run.pages.clone());
                    let write = RunWrite {
                        place: &run.place,
                        header: &run.header,
                        source: &source,
                        first: 0,
                    };
                    let result = segments.write_runs(&[write], &Control::default()).remove(0);
                    if let Ok(checksum) = result {
                        run.place.header_checksum = checksum;
                        run.check(&segments);
                        run.check(&segments);
                    } else {
                        assert_eq!(op, Op::Write);
                        assert_ne!(fault, MediumFault::Torn);
                    }
                    assert_eq!(segments.staging().in_use, 0);
                }
            }
        }
    }
}

#[test]
fn synced_runs_survive_crash_unsynced_runs_may_miss() {
    for seed in 0..40 {
        let disk = SimDisk::new(64 << 20);
        let dir = Path::new("/kv");
        disk.create_dir(dir).unwrap();
        let segments = open(Arc::new(disk.clone()), dir.into(), IoChoice::Auto);
        let ids = [SegmentId::new(0, 0), SegmentId::new(0, 1)];
        ids.iter().for_each(|&id| segments.create(id).unwrap());
        let mut synced = Run::at(1, 3, 50_000, &[20], 5);
        synced.write(&segments);
        segments.sync(&ids).unwrap();
        let mut lost = Run::at(2, 3, 50_000, &[20], 200);
        lost.write(&segments);
        let after = disk.crash(seed);
        let segments = open(Arc::new(after), dir.into(), IoChoice::Auto);
        assert_eq!(segments.existing().unwrap(), ids);
        assert_eq!(verified(&synced.check(&segments)), [true; 3]);
        lost.check(&segments);
    }
}

#[test]
fn failed_sync_is_fatal_but_full_disk_is_not() {
    let schedule = Schedule::new();
    let disk = SimDisk::new(64 << 20);
    let dir = Path::new("/kv");
    disk.create_dir(dir).unwrap();
    let faulty = Faulty::new(Arc::new(disk.clone()), schedule.clone());
    let segments = open(Arc::new(faulty), dir.into(), IoChoice::Auto);
    let id = SegmentId::new(0, 0);
    schedule.add(Rule::nth(1, MediumFault::NoSpace).on(Op::Allocate));
    let error = segments.create(id).unwrap_err();
    assert_eq!(error.kind(), ritornello_format::ErrorKind::Retry);
    assert!(disk.list(dir).unwrap().is_empty());
    // An empty directory is refused, because it may be the mount point of an unmounted volume.
    assert!(segments.existing().is_err());
    segments.create(id).unwrap();
    schedule.add(Rule::nth(1, MediumFault::Io).on(Op::SyncData));
    let error = segments.sync(&[id]).unwrap_err();
    assert_eq!(error.kind(), ritornello_format::ErrorKind::Fatal);
}

#[test]
fn segments_are_created_listed_and_removed() {
    let rig = rig(IoChoice::Auto);
    std::fs::write(rig.dir.path().join("seg-7"), b"not ours").unwrap();
    let ids = [SegmentId::new(0, 0), SegmentId::new(0, 1)];
    assert_eq!(rig.segments.existing().unwrap(), ids);
    assert!(rig.segments.allocated_bytes() >= 2 * SEGMENT_BYTES);
    assert!(rig.segments.create(ids[0]).is_err());
    // A client that opened the directory earlier finds a segment that is created later.
    let client = open(Arc::new(Host), rig.dir.path().into(), IoChoice::Auto);
    rig.segments.create(SegmentId::new(0, 2)).unwrap();
    let mut run = Run::new(5, 1, 9000, &[]);
    run.place.extents[0].segment = SegmentId::new(0, 2);
    run.write(&rig.segments);
    assert_eq!(verified(&run.check(&client)), [true]);
    rig.segments.remove(ids[0]).unwrap();
    rig.segments.remove(ids[0]).unwrap();
    assert_eq!(rig.segments.existing().unwrap(), [ids[1], SegmentId::new(0, 2)]);
    assert!(rig.segments.sync(&[ids[1], SegmentId::new(0, 2)]).is_ok());
}

/// A process may end after it set the length of a new segment in memory, and before it allocated
/// the memory.
#[test]
fn segment_in_memory_whose_creation_was_interrupted_is_allocated() {
    let Some(rig) = mapped_rig() else { return };
    let (id, path) = (SegmentId::new(0, 2), rig.dir.path().join("seg-000002"));
    std::fs::File::create(&path).unwrap().set_len(SEGMENT_BYTES).unwrap();
    assert!(rig.segments.restore_length(id).unwrap());
    assert!(std::fs::metadata(&path).unwrap().blocks() * 512 >= SEGMENT_BYTES);
    assert!(!rig.segments.restore_length(id).unwrap());
}

/// Removing a segment in memory unlinks its file without truncating it, in every I/O mode of this
/// process: another process may have the file mapped, and a truncation would raise SIGBUS there.
#[test]
fn segment_in_memory_is_unlinked_not_truncated() {
    for io in [IoChoice::Auto, IoChoice::Pool, IoChoice::Buffered] {
        let Ok(dir) = tempfile::tempdir_in("/dev/shm") else { return };
        let segments = open(Arc::new(Host), dir.path().into(), io);
        let id = SegmentId::new(0, 0);
        segments.create(id).unwrap();
        let mapped = std::fs::File::open(dir.path().join("seg-000000")).unwrap();
        segments.remove(id).unwrap();
        assert_eq!(mapped.metadata().unwrap().len(), SEGMENT_BYTES, "{io:?}");
        assert!(!dir.path().join("seg-000000").exists());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]
    #[test]
    fn flipped_bits_never_give_wrong_bytes(
        flips in proptest::collection::vec((0u8..4, 0u64..60 * UNIT, 0u8..8), 1..20),
        page_bytes in 1usize..60_000,
        volumes in proptest::sample::select(&VOLUMES[..]),
    ) {
        let rig = rigs_on(volumes).swap_remove(0);
        let mut run = Run::over(volumes, 1, 3, page_bytes);
        run.write(&rig.segments);
        for (volume, offset, bit) in flips {
            for number in 0..2 {
                let id = SegmentId::new(volume % volumes, number);
                corrupt(&rig, id, offset, |byte| byte[0] ^= 1 << bit, 1);
            }
        }
        run.check(&rig.segments);
    }
}
