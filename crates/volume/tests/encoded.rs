//! Pages encoded by a simple codec: a read returns the bytes that were written, or misses.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use proptest::prelude::*;
use ritornello_format::{SegmentId, Slice, UNIT};
use ritornello_medium::Host;
use ritornello_volume::*;
use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A codec that drops every other byte, if all dropped bytes are zero.
struct EveryOther;

const CODEC: u8 = 77;

impl Pack for EveryOther {
    fn pack(&self, slice: &[u8], out: &mut [u8]) -> Option<(u8, usize)> {
        if slice.iter().skip(1).step_by(2).any(|byte| *byte != 0) {
            out.copy_from_slice(slice);
            return Some((Slice::RAW, slice.len()));
        }
        let kept = slice.iter().step_by(2);
        let bytes = kept.len();
        out.iter_mut().zip(kept).for_each(|(to, byte)| *to = *byte);
        Some((CODEC, bytes))
    }
}

impl Unpack for EveryOther {
    fn knows(&self, codec: u8) -> bool {
        codec == CODEC
    }
    fn unpack(&self, _: u8, encoded: &[u8], out: &mut [u8]) -> Result<(), MissReason> {
        out.fill(0);
        let right = encoded.len() == out.len().div_ceil(2);
        out.iter_mut().step_by(2).zip(encoded).for_each(|(to, byte)| *to = *byte);
        if right { Ok(()) } else { Err(MissReason::Frame) }
    }
}

/// Returns a page of 16 parts, of which `EveryOther` cannot encode the first `noise`.
fn page(seed: u64, number: usize, length: usize, noise: usize) -> Vec<u8> {
    let mut page = bytes(seed, number, length);
    let from = length * noise / 16;
    for (at, byte) in page.iter_mut().enumerate().skip(from) {
        // Every second byte is zero, and the bytes between are random. `EveryOther` therefore
        // encodes a slice that begins with a random byte, and leaves a slice raw that begins with a
        // zero.
        *byte = if (at - from).is_multiple_of(2) { *byte } else { 0 };
    }
    page
}

/// Writes a run of pages in `slices` slices each; a page is encoded if this makes it shorter. The
/// extents are as in [`Run::new`].
fn encoded_run(
    rig: &Rig,
    generation: u64,
    slices: u16,
    contents: Vec<Vec<u8>>,
    extents: &[u32],
) -> Run {
    let length = contents[0].len() as u64;
    let source = OwnedPages::new(contents.clone());
    let packed: Vec<_> = (0..contents.len())
        .map(|page| {
            match rig.segments.pack_page(&source, page, length, slices, &EveryOther, None) {
                Packing::Packed(page) => Some(page),
                Packing::NoShorter => None,
                Packing::NoMemory => panic!("the arena is large enough"),
            }
        })
        .collect();
    let raw = length.div_ceil(UNIT) as u32;
    let units = packed.iter().map(|page| page.as_ref().map_or(raw, |page| page.units()));
    let longest = units.max().unwrap();
    // `Run::new` makes room for pages of one length. Encoded pages differ in length: pass the
    // length of the longest page.
    let mut run = Run::new(generation, contents.len(), longest as usize * UNIT as usize, extents);
    let whole: Vec<Slice> = (0..slices)
        .map(|number| {
            let part = Slice::part(number, slices, length);
            Slice { bytes: (part.end - part.start) as u32, codec: Slice::RAW, checksum: 0 }
        })
        .collect();
    let of = |page: &Option<_>| -> Vec<Slice> {
        page.as_ref().map_or(whole.clone(), |page: &transfer::PackedPage| page.slices().to_vec())
    };
    run.header.page_bytes = length;
    run.header.slices_per_page = slices;
    run.header.slices = packed.iter().flat_map(of).collect();
    run.pages = contents;
    let pages = PackedPages::new(&source, 0, packed);
    run.write_from(&rig.segments, &pages);
    run
}

fn read<'a>(
    rig: &Rig,
    run: &'a Run,
    first: usize,
    target: &dyn PageTarget,
    encoded: Encoded<'a>,
    control: &Control,
) -> Vec<PageOutcome> {
    let keys = run.keys();
    let read = RunRead {
        place: &run.place,
        scope: SCOPE,
        page_bytes: run.header.page_bytes,
        keys: &keys[first..first + target.len()],
        first: first as u32,
        target,
        target_first: 0,
        encoded,
    };
    rig.segments.read_runs(&[read], control).pop().unwrap()
}

/// Reads the pages from `first` into fragments of `fragment` bytes that begin `skew` bytes after a
/// 4 KiB boundary. Checks the bytes of verified pages.
fn read_and_check(
    rig: &Rig,
    run: &Run,
    first: usize,
    fragment: usize,
    skew: usize,
) -> Vec<PageOutcome> {
    let wanted = &run.pages[first..];
    let mut memory: Vec<Vec<Memory>> = wanted
        .iter()
        .map(|page| page.chunks(fragment).map(|part| Memory::new(part.len(), skew)).collect())
        .collect();
    let mut parts: Vec<Vec<&mut [u8]>> =
        memory.iter_mut().map(|page| page.iter_mut().map(Memory::slice_mut).collect()).collect();
    let target = BorrowedPagesMut::fragmented(&mut parts);
    let unpack = Encoded::Unpack(&EveryOther);
    let outcomes = read(rig, run, first, &target, unpack, &Control::default());
    drop(target);
    for (at, outcome) in outcomes.iter().enumerate() {
        let got: Vec<u8> = memory[at].iter().flat_map(|part| part.slice().to_vec()).collect();
        assert!(!outcome.is_verified() || got == wanted[at], "wrong bytes in page {at}");
    }
    outcomes
}

#[test]
fn mixed_encodings_round_trip_in_every_io_mode() {
    for rig in rigs() {
        // The runs have encoded, partly encoded and raw pages. In a run with a raw page, each
        // encoded page takes as much space on disk as the raw page. The transfer can therefore read
        // the encoded page into the target, and then decodes a copy of it.
        for noises in [vec![0, 8, 0], vec![0, 8, 16, 0]] {
            for (length, slices) in [(12_000, 1), (300_000, 4), (1_500_002, 16)] {
                let contents: Vec<Vec<u8>> =
                    (0..noises.len()).map(|n| page(5, n, length, noises[n])).collect();
                let run = encoded_run(&rig, 1, slices, contents, &[40, 3]);
                for first in 0..noises.len() {
                    for (fragment, skew) in [(length, 0), (length, 1), (70_001, 0), (5000, 7)] {
                        let outcomes = read_and_check(&rig, &run, first, fragment, skew);
                        assert!(
                            outcomes.iter().all(|outcome| outcome.is_verified()),
                            "{outcomes:?}"
                        );
                    }
                }
                let seen = rig.segments.verify_run(&run.place, &Control::default()).unwrap();
                assert!(seen.pages.iter().all(|outcome| outcome.is_verified()), "{:?}", seen.pages);
            }
        }
    }
}

/// A slice has a different offset on disk than in the page if the slices before it are encoded. The
/// encoded slice takes 16 KiB here, so the raw slice begins at a multiple of 4 KiB on disk too.
#[test]
fn raw_slice_after_shorter_slices_is_read_to_its_own_offset() {
    for rig in rigs() {
        let length = 16 * UNIT as usize;
        let mut contents: Vec<Vec<u8>> = (0..3).map(|n| bytes(6, n, length)).collect();
        for page in &mut contents {
            page[..length / 2].iter_mut().skip(1).step_by(2).for_each(|byte| *byte = 0);
        }
        let run = encoded_run(&rig, 1, 2, contents, &[]);
        let mut memory: Vec<Memory> = (0..3).map(|_| Memory::new(length, 0)).collect();
        let mut pages: Vec<&mut [u8]> = memory.iter_mut().map(Memory::slice_mut).collect();
        let target = BorrowedPagesMut::new(&mut pages);
        let sections = Arc::new(Sections::new(vec![length as u64 / 2, length as u64]).unwrap());
        let control = Control { sections: Some(Arc::clone(&sections)), ..Control::default() };
        let outcomes = read(&rig, &run, 0, &target, Encoded::Unpack(&EveryOther), &control);
        drop(target);
        assert_eq!(outcomes, [PageOutcome::Verified; 3]);
        assert_eq!(sections.arrived(), 2);
        for (memory, page) in memory.iter().zip(&run.pages) {
            assert!(memory.slice() == page, "wrong bytes");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn any_shape_round_trips(
        seed: u64,
        length in 1usize..400_000,
        slices in 1u16..40,
        noises in prop::collection::vec(0usize..=16, 1..5),
        extents in prop::collection::vec(1u32..30, 0..4),
        fragment in 1usize..100_000,
        skew in 0usize..4096,
    ) {
        let rig = rig(IoChoice::Auto);
        let slices = slices.min(length as u16);
        let contents: Vec<Vec<u8>> =
            (0..noises.len()).map(|n| page(seed, n, length, noises[n])).collect();
        let run = encoded_run(&rig, seed >> 1 | 1, slices, contents, &extents);
        let fragment = fragment.max(length / 500 + 1);
        let outcomes = read_and_check(&rig, &run, seed as usize % noises.len(), fragment, skew);
        prop_assert!(outcomes.iter().all(|outcome| outcome.is_verified()), "{:?}", outcomes);
    }
}

#[test]
fn flipped_byte_of_encoded_page_misses_by_checksum() {
    let rig = rig(IoChoice::Auto);
    let contents = (0..3).map(|n| page(9, n, 100_000, 0)).collect();
    let run = encoded_run(&rig, 1, 4, contents, &[]);
    let encoded: u64 = run.header.slices_of(1).iter().map(|slice| u64::from(slice.bytes)).sum();
    let start = run.place.page(1)[0].offset();
    let segment =
        fs::OpenOptions::new().read(true).write(true).open(segment_path(&rig, 0)).unwrap();
    for at in (0..encoded).step_by(997) {
        let mut byte = [0];
        segment.read_exact_at(&mut byte, start + at).unwrap();
        segment.write_all_at(&[byte[0] ^ 4], start + at).unwrap();
        let miss = PageOutcome::Missed(MissReason::Checksum);
        let expected = [PageOutcome::Verified, miss, PageOutcome::Verified];
        assert_eq!(read_and_check(&rig, &run, 0, 100_000, 0), expected, "byte {at}");
        let seen = rig.segments.verify_run(&run.place, &Control::default()).unwrap();
        assert_eq!(seen.pages, expected);
        segment.write_all_at(&byte, start + at).unwrap();
    }
    // Bytes after the last slice are padding.
    segment.write_all_at(&[1], start + encoded).unwrap();
    assert!(read_and_check(&rig, &run, 0, 100_000, 0).iter().all(|outcome| outcome.is_verified()));
}

/// An [`Unpack`] that knows every codec, and refuses every frame with the given reason.
struct RefusesEveryFrame(MissReason);

impl Unpack for RefusesEveryFrame {
    fn knows(&self, _: u8) -> bool {
        true
    }
    fn unpack(&self, _: u8, _: &[u8], _: &mut [u8]) -> Result<(), MissReason> {
        Err(self.0)
    }
}

/// An [`Unpack`] that knows no codec.
struct KnowsNoCodec;

impl Unpack for KnowsNoCodec {
    fn knows(&self, _: u8) -> bool {
        false
    }
    fn unpack(&self, _: u8, _: &[u8], _: &mut [u8]) -> Result<(), MissReason> {
        panic!("called for an unknown codec")
    }
}

#[test]
fn unknown_codec_is_not_damage_but_invalid_frame_is() {
    let rig = rig(IoChoice::Auto);
    let contents = vec![page(9, 0, 100_000, 0), page(9, 1, 100_000, 16)];
    let run = encoded_run(&rig, 1, 4, contents, &[]);
    let (newer, damaged) =
        (RefusesEveryFrame(MissReason::Codec), RefusesEveryFrame(MissReason::Frame));
    for (encoded, reason) in [
        (Encoded::Unpack(&newer), MissReason::Codec),
        (Encoded::Unpack(&KnowsNoCodec), MissReason::Codec),
        (Encoded::Refuse, MissReason::Codec),
        (Encoded::Unpack(&damaged), MissReason::Frame),
    ] {
        let mut memory = vec![vec![0; 100_000]; 2];
        let mut pages: Vec<&mut [u8]> = memory.iter_mut().map(Vec::as_mut_slice).collect();
        let target = BorrowedPagesMut::new(&mut pages);
        let outcomes = read(&rig, &run, 0, &target, encoded, &Control::default());
        assert_eq!(outcomes, [PageOutcome::Missed(reason), PageOutcome::Verified]);
    }
    assert!(!MissReason::Codec.is_damage() && MissReason::Frame.is_damage());
}

/// A page whose codec the reader does not know misses. The bytes of the missed page then no longer
/// count towards the limit of unverified bytes in memory, so the pages of the next run are read.
#[test]
fn unknown_codec_does_not_stop_later_reads() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let config = SegmentsConfig {
        dirs: vec![dir.path().into()],
        segment_bytes: SEGMENT_BYTES,
        io: IoChoice::Buffered,
        in_flight_bytes: 16 << 10,
    };
    let segments = Segments::open(Arc::new(Host), config).unwrap();
    segments.create(SegmentId::new(0, 0)).unwrap();
    let rig = Rig { dir, segments };
    let encoded = encoded_run(&rig, 1, 4, (0..6).map(|n| page(9, n, 100_000, 0)).collect(), &[]);
    let mut plain = Run::at(2, 2, 100_000, &[], 1000);
    plain.write(&rig.segments);
    let mut memory = vec![vec![0; 100_000]; 8];
    let mut pages: Vec<&mut [u8]> = memory.iter_mut().map(Vec::as_mut_slice).collect();
    let target = BorrowedPagesMut::new(&mut pages);
    let keys = [encoded.keys(), plain.keys()];
    let reads = [(&encoded, 0), (&plain, 6)].map(|(run, target_first)| RunRead {
        place: &run.place,
        scope: SCOPE,
        page_bytes: run.header.page_bytes,
        keys: &keys[target_first / 6],
        first: 0,
        target: &target,
        target_first,
        encoded: Encoded::Unpack(&KnowsNoCodec),
    });
    let outcomes = rig.segments.read_runs(&reads, &Control::default());
    drop(target);
    assert_eq!(outcomes[0], [PageOutcome::Missed(MissReason::Codec); 6]);
    assert_eq!(outcomes[1], [PageOutcome::Verified; 2]);
    assert!(memory[6..] == plain.pages, "wrong bytes");
}

/// Occupies staging memory with encoded pages, each of which keeps a buffer of one of `lengths`.
/// Encoding takes a buffer as long as the raw page; [`EveryOther`] halves the page, and the buffer
/// shrinks to half. For each length, encodes raw pages of twice the length until no buffer is free.
fn hold(rig: &Rig, lengths: &[u64]) -> Vec<transfer::PackedPage> {
    let mut held = Vec::new();
    for &length in lengths {
        let content = vec![page(1, 0, length as usize * 2, 0)];
        let source = OwnedPages::new(content);
        let pack = || rig.segments.pack_page(&source, 0, length * 2, 1, &EveryOther, None);
        while let Packing::Packed(page) = pack() {
            held.push(page);
        }
    }
    held
}

#[test]
fn staging_for_one_page_suffices_for_many() {
    let rig = rig(IoChoice::Auto);
    let length = 300_000;
    // Read a run in one extent, where an operation covers several pages, and a run in several
    // extents, which end inside pages.
    for extents in [&[][..], &[20, 50, 70]] {
        let contents: Vec<Vec<u8>> = (0..6).map(|n| page(4, n, length, 0)).collect();
        let run = encoded_run(&rig, 1, 1, contents, extents);
        let one = u64::from(run.place.page_units) * UNIT;
        let mut held = hold(&rig, &[4 << 20, one, UNIT]);
        let spare = held.iter().position(|page| u64::from(page.units()) * UNIT == one).unwrap();
        held.swap_remove(spare);
        let mut memory = vec![vec![0; length]; 6];
        let mut pages: Vec<&mut [u8]> = memory.iter_mut().map(Vec::as_mut_slice).collect();
        let target = BorrowedPagesMut::new(&mut pages);
        let soon = Control {
            deadline: Some(Instant::now() + Duration::from_secs(5)),
            ..Control::default()
        };
        let outcomes = read(&rig, &run, 0, &target, Encoded::Unpack(&EveryOther), &soon);
        drop(target);
        assert_eq!(outcomes, [PageOutcome::Verified; 6]);
        assert!(memory == run.pages, "wrong bytes");
    }
}

/// A page whose first piece could not be read does not wait for staging memory. No staging memory
/// becomes free here, so a wait would last until the deadline of the call, and the page of the next
/// run would be a miss as well.
#[test]
fn failed_page_does_not_wait_for_staging() {
    let rig = rig(IoChoice::Auto);
    // The encoded page begins in segment 1; the header and the remaining units are in segment 0.
    let encoded = encoded_run(&rig, 1, 1, vec![page(5, 0, 200_000, 0)], &[1, 10]);
    let mut plain = Run::at(2, 1, 1 << 17, &[], 1000);
    plain.write(&rig.segments);
    rig.segments.remove(SegmentId::new(0, 1)).unwrap();
    let _held = hold(&rig, &[4 << 20, UNIT]);
    let mut memory = [Memory::new(200_000, 0), Memory::new(1 << 17, 0)];
    let mut pages: Vec<&mut [u8]> = memory.iter_mut().map(Memory::slice_mut).collect();
    let target = BorrowedPagesMut::new(&mut pages);
    let keys = [encoded.keys(), plain.keys()];
    let reads = [(&encoded, 0), (&plain, 1)].map(|(run, target_first)| RunRead {
        place: &run.place,
        scope: SCOPE,
        page_bytes: run.header.page_bytes,
        keys: &keys[target_first],
        first: 0,
        target: &target,
        target_first,
        encoded: Encoded::Unpack(&EveryOther),
    });
    let control =
        Control { deadline: Some(Instant::now() + Duration::from_secs(10)), ..Control::default() };
    let outcomes = rig.segments.read_runs(&reads, &control);
    drop(target);
    assert_eq!(outcomes[0], [PageOutcome::Missed(MissReason::Io)]);
    assert_eq!(outcomes[1], [PageOutcome::Verified]);
    assert!(memory[1].slice() == plain.pages[0], "wrong bytes");
}

#[test]
fn read_without_staging_misses_at_its_deadline() {
    let rig = rig(IoChoice::Auto);
    let length = 200_000;
    let contents = (0..4).map(|n| page(3, n, length, 0)).collect();
    let run = encoded_run(&rig, 1, 1, contents, &[]);
    let mut held = hold(&rig, &[4 << 20, UNIT]);
    let attempt = |deadline| {
        let mut memory = vec![vec![0; length]; 4];
        let mut pages: Vec<&mut [u8]> = memory.iter_mut().map(Vec::as_mut_slice).collect();
        let target = BorrowedPagesMut::new(&mut pages);
        let control = Control { deadline, ..Control::default() };
        read(&rig, &run, 0, &target, Encoded::Unpack(&EveryOther), &control)
    };
    let silence = std::thread::scope(|scope| {
        let sampler = scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            rig.segments.longest_silence()
        });
        let soon = Instant::now() + Duration::from_millis(500);
        assert_eq!(attempt(Some(soon)), [PageOutcome::Missed(MissReason::Deadline); 4]);
        sampler.join().unwrap()
    });
    assert_eq!(silence, Duration::ZERO, "a wait for memory is no operation of the disk");
    held.clear();
    assert_eq!(attempt(None), [PageOutcome::Verified; 4]);
}
