//! Pages in sections: sections arrive in order, and a section that has arrived is verified.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::UNIT;
use ritornello_volume::*;
use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

const PAGE: usize = 96 * UNIT as usize;
const PAGES: usize = 5;

fn run_of(rig: &Rig, page_bytes: usize, slices: u16, extents: &[u32]) -> Run {
    let mut run = Run::new(9, PAGES, page_bytes, extents);
    run.header.slices_per_page = slices;
    run.write(&rig.segments);
    run
}

/// Reads the pages from `first` into `memory`, which is cut into fragments of `fragment` bytes.
fn read(
    rig: &Rig,
    run: &Run,
    first: usize,
    memory: &mut [Memory],
    fragment: usize,
    sections: &Arc<Sections>,
) -> Vec<PageOutcome> {
    let mut pages: Vec<Vec<&mut [u8]>> =
        memory.iter_mut().map(|page| page.slice_mut().chunks_mut(fragment).collect()).collect();
    let target = BorrowedPagesMut::fragmented(&mut pages);
    let control = Control { sections: Some(Arc::clone(sections)), ..Control::default() };
    run.read_controlled(&rig.segments, first, &target, &control)
}

fn memory(pages: usize, bytes: usize, skew: usize) -> Vec<Memory> {
    (0..pages).map(|_| Memory::new(bytes, skew)).collect()
}

fn sections(ends: &[usize]) -> Arc<Sections> {
    Arc::new(Sections::new(ends.iter().map(|end| *end as u64).collect()).unwrap())
}

/// Flips a bit of byte `at` of page `page` on the disk.
fn damage(rig: &Rig, run: &Run, page: usize, at: usize) {
    let place = &run.place;
    let unit = place.header_units as usize + page * place.page_units as usize;
    let logical = unit as u64 * UNIT + at as u64;
    let (mut base, mut found) = (0, None);
    for extent in &place.extents {
        if (base..base + extent.bytes()).contains(&logical) {
            found = Some((extent.segment.0, extent.offset() + logical - base));
        }
        base += extent.bytes();
    }
    let (segment, offset) = found.unwrap();
    let file = fs::File::options().read(true).write(true).open(segment_path(rig, segment)).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 1], offset).unwrap();
    file.sync_all().unwrap();
}

#[test]
fn all_pages_arrive_for_any_slices_and_sections() {
    for rig in rigs() {
        for (page, slices) in [(PAGE, 1), (PAGE, 6), (PAGE, 7), (PAGE + 77, 6), (5000, 3)] {
            for extents in [&[][..], &[40, 7, 100]] {
                let run = run_of(&rig, page, slices, extents);
                for ends in [vec![page / 3, page], vec![1, page / 2, page - 1, page]] {
                    for (skew, fragment) in [(0, page), (0, UNIT as usize), (1, 777)] {
                        let (first, ends) = (usize::from(skew > 0), sections(&ends));
                        let mut to = memory(PAGES - first, page, skew);
                        let outcomes = read(&rig, &run, first, &mut to, fragment, &ends);
                        assert!(
                            outcomes.iter().all(|outcome| outcome.is_verified()),
                            "{outcomes:?}"
                        );
                        for (memory, page) in to.iter().zip(&run.pages[first..]) {
                            assert!(memory.slice() == page, "wrong bytes");
                        }
                        assert!(ends.wait(ends.arrived() - 1, None));
                        assert_eq!(ends.page_bytes(), page as u64);
                    }
                }
            }
        }
    }
}

#[test]
fn damaged_slice_misses_only_its_page_and_later_sections() {
    for rig in rigs() {
        for skew in [0, 1] {
            let run = run_of(&rig, PAGE, 6, &[]);
            damage(&rig, &run, 2, PAGE * 4 / 6 + 5);
            let ends = sections(&[PAGE / 6, PAGE / 3, PAGE * 2 / 3, PAGE * 5 / 6, PAGE]);
            let mut to = memory(PAGES, PAGE, skew);
            let outcomes = read(&rig, &run, 0, &mut to, PAGE, &ends);
            let missed = PageOutcome::Missed(MissReason::Checksum);
            for (page, outcome) in outcomes.iter().enumerate() {
                let whole = page != 2;
                assert_eq!(*outcome, if whole { PageOutcome::Verified } else { missed });
                let right = if whole { PAGE } else { PAGE * 2 / 3 };
                assert!(to[page].slice()[..right] == run.pages[page][..right]);
            }
            assert_eq!(ends.arrived(), 3);
        }
    }
}

#[test]
fn damaged_first_slice_lets_no_section_arrive() {
    for rig in rigs() {
        let run = run_of(&rig, PAGE, 6, &[]);
        damage(&rig, &run, 4, 5);
        let ends = sections(&[PAGE / 6, PAGE]);
        let outcomes = read(&rig, &run, 0, &mut memory(PAGES, PAGE, 0), PAGE, &ends);
        assert_eq!(outcomes[4], PageOutcome::Missed(MissReason::Checksum));
        assert!(outcomes[..4].iter().all(|outcome| outcome.is_verified()));
        assert_eq!(ends.arrived(), 0);
    }
}

#[test]
fn arrived_sections_are_not_written_again() {
    for rig in rigs() {
        for slices in [6, 1, 4] {
            let run = run_of(&rig, PAGE, 6, &[]);
            damage(&rig, &run, 1, PAGE / 2 + 9);
            let ends = sections(&[PAGE / 3, PAGE / 2, PAGE]);
            let mut to = memory(PAGES, PAGE, 0);
            let _ = read(&rig, &run, 0, &mut to, PAGE, &ends);
            assert_eq!(ends.arrived(), 2);
            to.iter_mut().for_each(|page| page.slice_mut().fill(0x77));
            // Write the same pages again, in `slices` slices each: another store may divide them
            // differently.
            let run = run_of(&rig, PAGE, slices, &[]);
            let outcomes = read(&rig, &run, 0, &mut to, PAGE, &ends);
            assert!(outcomes.iter().all(|outcome| outcome.is_verified()));
            for (memory, page) in to.iter().zip(&run.pages) {
                assert!(memory.slice()[..PAGE / 2].iter().all(|byte| *byte == 0x77));
                assert!(memory.slice()[PAGE / 2..] == page[PAGE / 2..]);
            }
            assert_eq!(ends.arrived(), 3);
        }
    }
}

#[test]
fn wrong_header_or_stopped_call_misses() {
    for rig in rigs() {
        let mut run = run_of(&rig, PAGE, 6, &[]);
        let ends = sections(&[PAGE / 2, PAGE]);
        let mut to = memory(PAGES, PAGE, 0);
        let mut pages: Vec<&mut [u8]> = to.iter_mut().map(Memory::slice_mut).collect();
        let target = BorrowedPagesMut::new(&mut pages);
        let now = Control {
            deadline: Some(std::time::Instant::now()),
            sections: Some(Arc::clone(&ends)),
            ..Control::default()
        };
        let outcomes = run.read_controlled(&rig.segments, 0, &target, &now);
        assert_eq!(outcomes, [PageOutcome::Missed(MissReason::Deadline); PAGES]);
        drop(target);
        run.place.header_checksum ^= 1;
        let outcomes = read(&rig, &run, 0, &mut to, PAGE, &ends);
        assert_eq!(outcomes, [PageOutcome::Missed(MissReason::Header); PAGES]);
        assert_eq!(ends.arrived(), 0);
    }
}

#[test]
fn sections_of_another_page_length_are_ignored() {
    let rig = rig(IoChoice::Buffered);
    let run = run_of(&rig, PAGE, 6, &[]);
    let ends = sections(&[PAGE / 2, PAGE * 2]);
    let outcomes = read(&rig, &run, 0, &mut memory(PAGES, PAGE, 0), PAGE, &ends);
    assert!(outcomes.iter().all(|outcome| outcome.is_verified()));
    assert_eq!(ends.arrived(), 0);
}
