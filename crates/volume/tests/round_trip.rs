//! A get returns the pages that were written, for many layouts of memory and place.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;
use common::*;
use proptest::prelude::*;
use ritornello_format::UNIT;
use ritornello_volume::*;

fn all_verified(outcomes: &[PageOutcome]) -> bool {
    outcomes.iter().all(|outcome| outcome.is_verified())
}

#[test]
fn pages_of_any_size_round_trip() {
    for rig in rigs() {
        for (n, page_bytes) in
            [1, 100, 4095, 4096, 4097, 70_000, 196_608, 1 << 20, (1 << 20) + 8, 3 << 20]
                .into_iter()
                .enumerate()
        {
            let count = if page_bytes > 1 << 20 { 2 } else { 5 };
            let mut run = Run::new(n as u64 + 1, count, page_bytes, &[]);
            run.write(&rig.segments);
            assert!(all_verified(&run.check(&rig.segments)), "{page_bytes} {:?}", rig.segments);
            let (outcomes, out) = run.read(&rig.segments, 1, 1);
            assert!(all_verified(&outcomes) && out[0] == run.pages[1]);
        }
        assert_eq!(rig.segments.staging().in_use, 0);
    }
}

#[test]
fn runs_in_many_extents_round_trip() {
    for rig in rigs() {
        let cases: [(usize, usize, &[u32]); 4] = [
            (3, 1 << 20, &[1, 100, 156, 64, 300]),
            (3, 1 << 20, &[257, 256]),
            (4, 49 * 4096, &[50, 49, 49]),
            (1, 2 << 20, &[65, 64, 64, 64]),
        ];
        for (n, (count, page_bytes, extents)) in cases.into_iter().enumerate() {
            let mut run = Run::new(50 + n as u64, count, page_bytes, extents);
            assert!(run.place.extents.len() > 1);
            run.write(&rig.segments);
            assert!(all_verified(&run.check(&rig.segments)), "case {n} {:?}", rig.segments);
            let (outcomes, out) = run.read(&rig.segments, count - 1, 1);
            assert!(all_verified(&outcomes) && out[0] == run.pages[count - 1]);
        }
    }
}

#[test]
fn fragments_of_any_length_and_alignment_round_trip() {
    for rig in rigs() {
        // Each pair is the length of a fragment and the distance of its start from the 4 KiB
        // boundary before it.
        let shapes: [&[(usize, usize)]; 5] = [
            &[(65536, 0), (131_072, 0)],
            &[(65536, 0), (4096, 0), (126_976, 0)],
            &[(65536, 64), (131_072, 0)],
            &[(1, 0), (196_607, 1)],
            &[(10, 5), (4096, 0), (192_502, 3)],
        ];
        for (n, from) in shapes.into_iter().enumerate() {
            for to in shapes {
                let mut run = Run::new(100 + n as u64, 3, 196_608, &[1 + 48 * 2]);
                let cut = |page: &[u8], shape: &[(usize, usize)]| -> Vec<Memory> {
                    let mut rest = page;
                    shape
                        .iter()
                        .map(|&(length, skew)| {
                            let (head, tail) = rest.split_at(length);
                            rest = tail;
                            Memory::filled(head, skew)
                        })
                        .collect()
                };
                let memory: Vec<Vec<Memory>> =
                    run.pages.iter().map(|page| cut(page, from)).collect();
                let source: Vec<Vec<&[u8]>> =
                    memory.iter().map(|page| page.iter().map(Memory::slice).collect()).collect();
                run.write_from(&rig.segments, &BorrowedPages::fragmented(&source));

                let mut out: Vec<Vec<Memory>> =
                    (0..3).map(|_| to.iter().map(|&(l, s)| Memory::new(l, s)).collect()).collect();
                let mut slices: Vec<Vec<&mut [u8]>> = out
                    .iter_mut()
                    .map(|page| page.iter_mut().map(Memory::slice_mut).collect())
                    .collect();
                let target = BorrowedPagesMut::fragmented(&mut slices);
                assert!(all_verified(&run.read_into(&rig.segments, 0, &target)));
                for (page, memory) in out.iter().enumerate() {
                    let got: Vec<u8> =
                        memory.iter().flat_map(|part| part.slice().to_vec()).collect();
                    assert!(got == run.pages[page]);
                }
            }
        }
    }
}

#[test]
fn aligned_memory_uses_no_staging() {
    for rig in rigs() {
        let mut run = Run::new(1, 4, 196_608, &[]);
        let memory: Vec<Memory> = run.pages.iter().map(|page| Memory::filled(page, 0)).collect();
        let source: Vec<&[u8]> = memory.iter().map(Memory::slice).collect();
        run.write_from(&rig.segments, &BorrowedPages::new(&source));
        let mut out: Vec<Memory> = (0..4).map(|_| Memory::new(196_608, 0)).collect();
        let mut slices: Vec<&mut [u8]> = out.iter_mut().map(Memory::slice_mut).collect();
        let target = BorrowedPagesMut::new(&mut slices);
        assert!(all_verified(&run.read_into(&rig.segments, 0, &target)));
        assert_eq!(rig.segments.staging().peak, 0);
        // A `BorrowedPagesMut` hands out the memory of each page once, so a second read misses.
        let again = run.read_into(&rig.segments, 0, &target);
        assert_eq!(again, [PageOutcome::Missed(MissReason::Memory); 4]);
    }
}

#[test]
fn padding_of_pages_and_header_is_zero() {
    for rig in rigs() {
        for staged in [false, true] {
            let mut run = Run::new(9, 2, 5000, &[]);
            if staged {
                let staging = Staging::new(1).unwrap();
                staging.try_take(1 << 20).unwrap().bytes_mut().fill(0xff);
                let source = OwnedPages::new(run.pages.clone());
                run.write_from(&rig.segments, &staging.try_copy(&source, 0..2).unwrap());
            } else {
                run.write(&rig.segments);
            }
            rig.segments.sync(&[run.place.extents[0].segment]).unwrap();
            let disk = std::fs::read(segment_path(&rig, 0)).unwrap();
            let at = run.place.extents[0].offset() as usize;
            let unit = UNIT as usize;
            assert!(disk[at + unit + 5000..at + 3 * unit].iter().all(|&byte| byte == 0));
            assert_eq!(&disk[at + unit..at + unit + 5000], run.pages[0]);
            assert_eq!(disk[at + unit - 1], 0);
        }
    }
}

#[test]
fn many_runs_are_written_and_read_in_one_call() {
    for rig in rigs() {
        let mut runs: Vec<Run> =
            (0..20).map(|n| Run::at(n, 3, 20_000, &[], 5 + n as u32 * 20)).collect();
        let sources: Vec<OwnedPages> =
            runs.iter().map(|run| OwnedPages::new(run.pages.clone())).collect();
        let writes: Vec<RunWrite> = runs
            .iter()
            .zip(&sources)
            .map(|(run, source)| RunWrite {
                place: &run.place,
                header: &run.header,
                source,
                first: 0,
            })
            .collect();
        let sums = rig.segments.write_runs(&writes, &Control::default());
        for (run, sum) in runs.iter_mut().zip(sums) {
            run.place.header_checksum = sum.unwrap();
        }
        let mut out = vec![vec![0; 20_000]; 60];
        let mut slices: Vec<&mut [u8]> = out.iter_mut().map(Vec::as_mut_slice).collect();
        let target = BorrowedPagesMut::new(&mut slices);
        let keys: Vec<Vec<&[u8]>> = runs.iter().map(Run::keys).collect();
        let reads: Vec<RunRead> = runs
            .iter()
            .enumerate()
            .map(|(n, run)| RunRead {
                place: &run.place,
                scope: SCOPE,
                page_bytes: 20_000,
                keys: &keys[n],
                first: 0,
                target: &target,
                target_first: n * 3,
                encoded: Encoded::Refuse,
            })
            .collect();
        let outcomes = rig.segments.read_runs(&reads, &Control::default());
        assert!(outcomes.iter().all(|outcomes| all_verified(outcomes)));
        for (n, page) in out.iter().enumerate() {
            assert!(*page == runs[n / 3].pages[n % 3]);
        }
    }
}

#[test]
fn threads_move_runs_concurrently() {
    for rig in rigs() {
        std::thread::scope(|scope| {
            for thread in 0..6 {
                let segments = &rig.segments;
                scope.spawn(move || {
                    for round in 0..8 {
                        let generation = thread * 100 + round;
                        let mut run =
                            Run::at(generation, 3, 99_000, &[80], 10 + 160 * thread as u32);
                        run.write(segments);
                        assert!(all_verified(&run.check(segments)));
                    }
                });
            }
        });
        assert_eq!(rig.segments.staging().in_use, 0);
    }
}

#[test]
fn runs_are_verified_and_found_without_index() {
    for rig in rigs() {
        let mut runs: Vec<Run> =
            (1..6).map(|n| Run::at(n, 4, 30_000, &[20], 10 + 60 * n as u32)).collect();
        // Page 0 of the decoy contains a copy of a run's header, which must not be taken for a run.
        let inner = runs[0].clone();
        runs.iter_mut().for_each(|run| run.write(&rig.segments));
        let header = rig.segments.read_header(&runs[0].place).unwrap();
        assert_eq!((header.scope, &header.keys), (SCOPE, &inner.header.keys));
        let mut decoy = Run::at(99, 1, 8192, &[], 600);
        decoy.pages[0][4096..][..4096].copy_from_slice(&{
            let mut bytes = header.encode().unwrap().0;
            bytes.resize(4096, 0);
            bytes
        });
        decoy.write(&rig.segments);

        let mut found = Vec::new();
        let id = runs[0].place.extents[0].segment;
        let unreadable =
            rig.segments.scan_headers(id, &Control::default(), &mut |run| found.push(run)).unwrap();
        assert_eq!(unreadable, 0);
        found.sort_by_key(|run| run.place.generation);
        assert_eq!(found.len(), 6);
        for (found, run) in found.iter().zip(&runs) {
            assert_eq!(found.place, run.place);
            let verified = rig.segments.verify_run(&found.place, &Control::default()).unwrap();
            assert!(all_verified(&verified.pages) && verified.pages.len() == 4);
        }
        assert_eq!(rig.segments.staging().in_use, 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn any_run_round_trips(
        page_bytes in 1usize..400_000,
        count in 1usize..9,
        extents in proptest::collection::vec(1u32..120, 0..5),
        skew in prop_oneof![Just(0usize), 1usize..4096],
        first in 0usize..8,
        generation in 1u64..1000,
    ) {
        let rig = rig(IoChoice::Auto);
        let mut run = Run::new(generation, count, page_bytes, &extents);
        let memory: Vec<Memory> = run.pages.iter().map(|page| Memory::filled(page, skew)).collect();
        let source: Vec<&[u8]> = memory.iter().map(Memory::slice).collect();
        run.write_from(&rig.segments, &BorrowedPages::new(&source));
        let first = first.min(count - 1);
        let (outcomes, out) = run.read(&rig.segments, first, count - first);
        prop_assert!(all_verified(&outcomes), "{outcomes:?}");
        prop_assert!(out == run.pages[first..]);
    }
}
