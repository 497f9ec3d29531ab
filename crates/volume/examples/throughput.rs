//! `cargo run --release -p ritornello-volume --example throughput -- [DIR [MIB [PAGE_KIB
//! [IN_FLIGHT_MIB [SKEW]]]]]`
//!
//! DIR is the directory for the segment files (default `/var/tmp/ritornello-throughput`), MIB the
//! total length of the pages in MiB (default 1024), PAGE_KIB the length of a page in KiB (default
//! 8192), and IN_FLIGHT_MIB the length in MiB of the operations that one call keeps in flight
//! (default 32). SKEW is the number of unused bytes after each page in memory (default 0). The
//! environment variable `IO` selects the I/O mode: `pool` or `buffered`; with any other value, or
//! without it, the store chooses.
//!
//! Prints the rates of writing and reading runs, and the ratio of each to the rate of plain
//! operations on one file of the same disk (`baseline`), measured in the same process. The lines
//! `raw` are about the plain operations. The lines `fresh` are about the first writes to newly
//! allocated blocks.
#![allow(clippy::unwrap_used)]

use ritornello_format::{Extent, KeyList, Place, RunHeader, ScopeId, SegmentId, units_of};
use ritornello_medium::Host;
use ritornello_volume::baseline::{Limit, Rate};
use ritornello_volume::*;
use std::sync::Arc;

const SEGMENT: u64 = 256 << 20;
const RUN_PAGES: usize = 32;

/// Huge-page memory in the role of a caller's memory.
struct Caller(Vec<StagingBuffer>, usize);

// SAFETY: the buffers live as long as this value, and no two reads that `main` makes at the same
// time fill the same page.
unsafe impl PageTarget for Caller {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<FragmentMut>) {
        let at = self.0[page % self.0.len()].bytes().as_ptr().cast_mut();
        // SAFETY: the fragment is inside the buffer.
        out.push(unsafe { FragmentMut::new(at, self.1) });
    }
}

// SAFETY: the buffers live as long as this value.
unsafe impl PageSource for Caller {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<Fragment>) {
        let at = self.0[page % self.0.len()].bytes().as_ptr();
        // SAFETY: the fragment is inside the buffer.
        out.push(unsafe { Fragment::new(at, self.1) });
    }
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let number =
        |at: usize, default: u64| args.get(at).map_or(default, |text| text.parse::<u64>().unwrap());
    let dir = args.get(1).map_or("/var/tmp/ritornello-throughput", String::as_str);
    let (total, page) = (number(2, 1024) << 20, number(3, 8192) << 10);
    let in_flight = (number(4, 32) << 20) as usize;
    let skew = number(5, 0) as usize;
    std::fs::create_dir_all(dir).unwrap();
    let dir = tempfile::tempdir_in(dir).unwrap();
    let config = SegmentsConfig {
        dirs: vec![dir.path().into()],
        segment_bytes: SEGMENT,
        io: match std::env::var("IO").as_deref() {
            Ok("pool") => IoChoice::Pool,
            Ok("buffered") => IoChoice::Buffered,
            _ => IoChoice::Auto,
        },
        in_flight_bytes: in_flight,
    };
    let segments = Segments::open(Arc::new(Host), config).unwrap();
    println!("{:?}", segments.report());

    // Runs are stored one after another.
    let page_units = units_of(page) as u32;
    let mut runs = Vec::new();
    let (mut segment, mut at) = (0u32, 0u32);
    let run_pages = RUN_PAGES.min((SEGMENT / page - 1) as usize);
    let count = (total / page) as usize / run_pages;
    for generation in 1..=count as u64 {
        let keys: KeyList = (0..run_pages)
            .map(|n| [generation.to_le_bytes(), (n as u64).to_le_bytes()].concat())
            .collect();
        let header_units = RunHeader::units(keys.iter().map(<[u8]>::len), 1);
        let units = header_units + page_units * run_pages as u32;
        if u64::from(at + units) * 4096 > SEGMENT {
            (segment, at) = (segment + 1, 0);
        }
        let id = SegmentId::new(0, segment);
        let extents = vec![Extent { segment: id, start: at, units }];
        at += units;
        let place = Place { generation, header_units, page_units, extents, ..Place::default() };
        let scope = ScopeId([1; 16]);
        let header = RunHeader { scope, page_bytes: page, keys, ..RunHeader::default() };
        runs.push((place, header));
    }
    let ids: Vec<SegmentId> = (0..=segment).map(|number| SegmentId::new(0, number)).collect();
    let bytes = runs.len() as u64 * run_pages as u64 * page;

    // Use at most 1 GiB of caller memory.
    let arena = Staging::new((1 << 30) + (2 << 20)).unwrap();
    let count = ((1 << 30) / (page as usize + skew).next_multiple_of(4096)) / run_pages * run_pages;
    let mut memory: Vec<StagingBuffer> = (0..count.min(runs.len() * run_pages).max(run_pages))
        .map(|_| arena.try_take(page as usize + skew).unwrap())
        .collect();
    for (n, buffer) in memory.iter_mut().enumerate() {
        for (at, word) in buffer.bytes_mut().chunks_mut(8).enumerate() {
            word.copy_from_slice(&((at * 77 + n) as u64).to_le_bytes());
        }
    }
    let memory = Caller(memory, page as usize);
    let sources = memory.0.len();

    let mut limit = Limit::prepare(Arc::new(Host), dir.path(), bytes).unwrap();
    println!("raw fresh      {:.2} GiB/s", limit.write_fresh().unwrap().gib_s());
    println!("best shapes of writes and of reads {:?}", limit.sweep().unwrap());
    let show = |what: &str, rate: Rate, raw: f64| {
        println!(
            "{what:14} {:6.2} GiB/s  cpu {:.3} s/GiB  ratio {:.2}",
            rate.gib_s(),
            rate.cpu_s_per_gib(),
            rate.gib_s() / raw
        );
    };
    let put = |runs: &mut Vec<(Place, RunHeader)>| {
        Rate::of(bytes, || {
            let writes: Vec<RunWrite> = runs
                .iter()
                .enumerate()
                .map(|(n, (place, header))| {
                    let first = n * run_pages % sources;
                    RunWrite { place, header, source: &memory, first }
                })
                .collect();
            let sums = segments.write_runs(&writes, &Control::default());
            for ((place, _), sum) in runs.iter_mut().zip(sums) {
                place.header_checksum = sum?;
            }
            segments.sync(&ids)
        })
        .unwrap()
    };
    let get = |runs: &Vec<(Place, RunHeader)>| {
        Rate::of(bytes, || {
            for batch in runs.chunks((sources / run_pages).max(1)) {
                let keys: Vec<Vec<&[u8]>> =
                    batch.iter().map(|(_, header)| header.keys.iter().collect()).collect();
                let reads: Vec<RunRead> = batch
                    .iter()
                    .enumerate()
                    .map(|(n, (place, header))| RunRead {
                        place,
                        scope: header.scope,
                        page_bytes: page,
                        keys: &keys[n],
                        first: 0,
                        target: &memory,
                        target_first: n * run_pages,
                        encoded: Encoded::Refuse,
                    })
                    .collect();
                for outcomes in segments.read_runs(&reads, &Control::default()) {
                    assert!(outcomes.iter().all(|outcome| outcome.is_verified()), "{outcomes:?}");
                }
            }
            Ok(())
        })
        .unwrap()
    };
    let raw = limit.write_fresh().unwrap();
    show("raw fresh", raw, raw.gib_s());
    ids.iter().for_each(|&id| segments.create(id).unwrap());
    show("put fresh", put(&mut runs), raw.gib_s());
    let mut ratios = (Vec::new(), Vec::new());
    for _ in 0..5 {
        let raw = limit.write().unwrap();
        show("raw write", raw, raw.gib_s());
        let rate = put(&mut runs);
        show("put", rate, raw.gib_s());
        ratios.0.push(rate.gib_s() / raw.gib_s());
        let raw = limit.read().unwrap();
        show("raw read", raw, raw.gib_s());
        let rate = get(&runs);
        show("get", rate, raw.gib_s());
        ratios.1.push(rate.gib_s() / raw.gib_s());
    }
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    println!("median ratio: put {:.2} get {:.2}", median(ratios.0), median(ratios.1));
    println!("memcpy         {:.2} GiB/s", limit.memcpy().gib_s());
}
