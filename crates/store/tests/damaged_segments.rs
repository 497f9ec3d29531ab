//! Damage in one volume's segments costs the damaged pages and, in a chained scope, the pages after
//! them: on one, two and four volumes, also if the pages are striped over all volumes. A damaged
//! header costs its run. The loss of a segment file costs every run that has a part in the file.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::items::Item;
use common::*;
use ritornello_format::{Extent, SegmentId};
use ritornello_medium::{Access, Medium, SimDisk};
use ritornello_store::{Catalog, ClientId, Options};
use ritornello_volume::segments::Segments;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const SEGMENT_BYTES: u64 = 8 * MIB;
/// Bytes of a long page: more than 16 MiB, so that the page is striped over all volumes.
const LONG: u64 = 16 * MIB + 5_001;

/// A range of bytes in a segment.
type Part = (SegmentId, Range<usize>);
/// The contents of all segments.
type Contents = BTreeMap<SegmentId, Vec<u8>>;

/// The places of an item's pages.
struct Located {
    /// By page, the place of its run's header.
    headers: Vec<Vec<Part>>,
    /// By page, the places of its bytes, without padding.
    pages: Vec<Vec<Part>>,
    /// By page, all segments that hold a part of its run.
    segments: Vec<BTreeSet<SegmentId>>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum DamageKind {
    FlippedBit,
    /// Zeroes the second half of a page, or of its piece on one volume, as if this half was not
    /// written.
    TornPage,
    /// Fills the place of a page with the bytes of an earlier page, as if the page was not written.
    StalePage,
    FlippedBitInHeader,
    /// A segment has the contents that it had at an earlier moment.
    StaleSegment,
    /// A segment's file has changed places with a file of another volume; in a store on one volume,
    /// with another file of this volume.
    SwappedFiles,
    TruncatedFile,
    RemovedFile,
}

const DAMAGE_KINDS: [DamageKind; 8] = [
    DamageKind::FlippedBit,
    DamageKind::TornPage,
    DamageKind::StalePage,
    DamageKind::FlippedBitInHeader,
    DamageKind::StaleSegment,
    DamageKind::SwappedFiles,
    DamageKind::TruncatedFile,
    DamageKind::RemovedFile,
];

/// Returns eight items of short pages, four in each of two scopes, and two items of long pages. The
/// numbers of their sequences begin at `first`.
fn items(first: u64) -> Vec<Item> {
    let mut items: Vec<Item> = (first..first + 4)
        .flat_map(|name| {
            [
                Item::new("short chained", name, 40_001, true, 6),
                Item::new("short unchained", name, 70_001, false, 6),
            ]
        })
        .collect();
    items.push(Item::new("long chained", first, LONG, true, 2));
    items.push(Item::new("long unchained", first, LONG + 1_000_000, false, 1));
    items
}

fn store_on(volumes: usize) -> Options {
    let paths = (0..volumes).map(|at| PathBuf::from(format!("/disk{at}"))).collect();
    let segment_bytes = Some(SEGMENT_BYTES);
    Options { paths, segment_bytes, background_threads: false, ..options(Path::new("/store"), 200) }
}

fn open_sim(disk: &SimDisk, options: &Options) -> Open {
    open_on(Arc::new(disk.clone()), options).unwrap()
}

fn path_of(id: SegmentId) -> PathBuf {
    Path::new(&format!("/disk{}", id.volume())).join(Segments::file_name(id))
}

fn contents(disk: &SimDisk, ids: impl Iterator<Item = SegmentId>) -> Contents {
    let read = |id| {
        let mut bytes = vec![0; SEGMENT_BYTES as usize];
        let file = disk.open(&path_of(id), Access::default()).ok()?;
        let length = file.read_at(&mut bytes, 0).unwrap();
        bytes.truncate(length);
        Some((id, bytes))
    };
    ids.filter_map(read).collect()
}

fn write(disk: &SimDisk, id: SegmentId, offset: usize, bytes: &[u8]) {
    let access = Access { write: true, ..Access::default() };
    disk.open(&path_of(id), access).unwrap().write_at(bytes, offset as u64).unwrap();
}

fn locate(open: &Open, item: &Item, before: &Contents) -> Located {
    let catalog = open.core.catalog_for(ClientId::LOCAL, "");
    let reference = catalog.resolve(&item.scope, false).unwrap().unwrap();
    let found = catalog.begin_read(reference, &refs(&item.keys)).unwrap();
    catalog.release(found.lease).unwrap();
    let mut located = Located { headers: Vec::new(), pages: Vec::new(), segments: Vec::new() };
    for run in &found.runs {
        let (place, start) = (&run.place, run.place.extents[0].offset() as usize);
        let head = &before[&place.extents[0].segment][start..];
        let length = u32::from_le_bytes(head[12..16].try_into().unwrap());
        for page in run.first..run.first + run.pages {
            located.headers.push(parts(&place.header(), length.into()));
            located.pages.push(parts(&place.page(page), item.scope.resolved_page_bytes().unwrap()));
            located.segments.push(place.extents.iter().map(|extent| extent.segment).collect());
        }
    }
    assert_eq!(located.pages.len(), item.keys.len());
    located
}

/// The first `length` bytes of `extents`.
fn parts(extents: &[Extent], mut length: u64) -> Vec<Part> {
    let mut parts = Vec::new();
    for extent in extents {
        let (start, bytes) = (extent.offset() as usize, extent.bytes().min(length) as usize);
        parts.push((extent.segment, start..start + bytes));
        length -= bytes as u64;
    }
    assert_eq!(length, 0);
    parts
}

impl Located {
    /// Returns which pages a store must still deliver, from a comparison of the segments' bytes.
    fn left(&self, is_chained: bool, before: &Contents, after: &Contents) -> Vec<bool> {
        let is_same = |(id, range): &Part| {
            let bytes = after.get(id).and_then(|bytes| bytes.get(range.clone()));
            bytes == Some(&before[id][range.clone()])
        };
        let mut behind = false;
        let pages = self.headers.iter().zip(&self.pages).zip(&self.segments);
        pages
            .map(|((header, page), segments)| {
                // A run that has lost one of its segments is dropped as a whole.
                let left = segments.iter().all(|id| after.contains_key(id))
                    && header.iter().chain(page).all(is_same);
                behind |= is_chained && !left;
                left && !behind
            })
            .collect()
    }
}

/// Damages the segments of volume `victim` on `disk`, whose segments have the contents `before`;
/// `stale` holds their earlier contents.
fn damage(
    kind: DamageKind,
    disk: &SimDisk,
    victim: u8,
    located: &[Located],
    before: &Contents,
    stale: &Contents,
) {
    let is_victim = |(id, range): &&Part| id.volume() == victim && range.len() > 1024;
    let segment = *before.keys().find(|id| id.volume() == victim).unwrap();
    match kind {
        DamageKind::FlippedBit | DamageKind::TornPage | DamageKind::StalePage => {
            // Damage one page among the items of short pages, and one page among the last two
            // items, whose pages are long.
            let (short, long) = located.split_at(located.len() - 2);
            for located in [short, long] {
                let mut pieces = located.iter().flat_map(|item| item.pages.iter().flatten());
                let (id, range) = pieces.find(is_victim).unwrap();
                let old = &before[id][range.clone()];
                let middle = range.len() / 2 / 512 * 512;
                match kind {
                    DamageKind::FlippedBit => {
                        write(disk, *id, range.end - 1, &[old[old.len() - 1] ^ 8])
                    }
                    DamageKind::TornPage => {
                        write(disk, *id, range.start + middle, &vec![0; range.len() - middle]);
                    }
                    _ => write(disk, *id, range.start, &stale[id][range.clone()]),
                }
            }
        }
        DamageKind::FlippedBitInHeader => {
            let mut headers = located.iter().flat_map(|item| item.headers.iter().flatten());
            let (id, range) = headers.find(|(id, _)| id.volume() == victim).unwrap();
            write(disk, *id, range.start + 60, &[before[id][range.start + 60] ^ 1]);
        }
        DamageKind::StaleSegment => write(disk, segment, 0, &stale[&segment]),
        DamageKind::SwappedFiles => {
            let other = before.keys().find(|id| id.volume() != victim);
            let other = *other.or(before.keys().nth(1)).unwrap();
            let between = Path::new("/between");
            disk.rename(&path_of(segment), between).unwrap();
            disk.rename(&path_of(other), &path_of(segment)).unwrap();
            disk.rename(between, &path_of(other)).unwrap();
        }
        DamageKind::TruncatedFile => {
            let access = Access { write: true, ..Access::default() };
            let file = disk.open(&path_of(segment), access).unwrap();
            file.set_len(SEGMENT_BYTES / 3).unwrap();
        }
        DamageKind::RemovedFile => disk.remove(&path_of(segment)).unwrap(),
    }
}

/// A store on `volumes` volumes. `located` has the places of its `items`, `before` the contents of
/// its segments, and `stale` their contents before `items` took the space of deleted items.
struct Fixture {
    volumes: usize,
    disk: SimDisk,
    items: Vec<Item>,
    located: Vec<Located>,
    before: Contents,
    stale: Contents,
}

impl Fixture {
    fn new(volumes: usize) -> Self {
        let disk = SimDisk::new(512 * MIB);
        let open = open_sim(&disk, &store_on(volumes));
        let (old, items) = (items(100), items(1));
        old.iter()
            .for_each(|item| assert_eq!(item.put(&open.store).unwrap().pages, item.keys.len()));
        open.store.flush().unwrap();
        let earlier = disk.crash(0);
        for item in &old {
            open.store.delete(&item.scope, &refs(&item.keys)).unwrap();
        }
        // Flush twice, so that the space is durably free and is reused.
        open.store.flush().unwrap();
        open.store.flush().unwrap();
        items
            .iter()
            .for_each(|item| assert_eq!(item.put(&open.store).unwrap().pages, item.keys.len()));
        open.store.flush().unwrap();
        let all = || {
            let each = |volume| (0..32).map(move |number| SegmentId::new(volume, number));
            (0..volumes as u8).flat_map(each)
        };
        let (before, stale) = (contents(&disk, all()), contents(&earlier, all()));
        assert_eq!(
            before.len(),
            stale.len(),
            "the new items must reuse the space of the earlier items"
        );
        let located: Vec<Located> = items.iter().map(|item| locate(&open, item, &before)).collect();
        let long = located.last().unwrap();
        let on: BTreeSet<u8> = long.pages[0].iter().map(|(id, _)| id.volume()).collect();
        assert_eq!(on.len(), volumes, "a long page must be on all volumes");
        open.close();
        Self { volumes, disk, items, located, before, stale }
    }

    fn check(&self, kind: DamageKind, victim: u8, is_verified_first: bool) {
        let what = format!("{kind:?} on volume {victim} of {}", self.volumes);
        let disk = self.disk.crash(1);
        damage(kind, &disk, victim, &self.located, &self.before, &self.stale);
        let after = contents(&disk, self.before.keys().copied());
        let expected: Vec<Vec<bool>> = self
            .items
            .iter()
            .zip(&self.located)
            .map(|(item, located)| located.left(item.scope.chained, &self.before, &after))
            .collect();
        let count = |ok: bool| expected.iter().flatten().filter(|left| **left == ok).count();
        assert!(count(false) > 0, "{what}: no page is damaged");
        assert!(count(true) > 0 || self.volumes == 1, "{what}: every page is damaged");

        let open = open_sim(&disk, &store_on(self.volumes));
        if is_verified_first {
            open.core.verify(false, &mut |_, _| {}).unwrap();
        }
        for (item, expected) in self.items.iter().zip(&expected) {
            let mut found = item.get(&open.store).unwrap();
            if item.scope.chained {
                // The first get may still deliver pages after a damaged page: the store removes
                // these pages when the get has found the damage.
                found.ok[found.pages..].fill(false);
            }
            assert_eq!(found.ok, *expected, "{what}: {}", item.scope.model);
        }
        let stats = open.core.stats().unwrap();
        assert_eq!(stats.pages, count(true) as u64, "{what}: only damaged pages must be removed");
        if !is_verified_first {
            let report = open.core.verify(false, &mut |_, _| {}).unwrap();
            assert!(report.findings.is_empty(), "{what}: {report:?}");
        }
        for (item, _) in self.items.iter().zip(&expected).filter(|(_, left)| left.contains(&false))
        {
            let all = item.keys.len();
            assert_eq!(
                item.put(&open.store).unwrap().pages,
                all,
                "{what}: damaged pages must be stored anew"
            );
            assert_eq!(
                item.get(&open.store).unwrap().pages,
                all,
                "{what}: pages that were stored anew must be delivered"
            );
        }
        open.store.flush().unwrap();
        open.store.flush().unwrap();
        let used = open.core.stats().unwrap().used_bytes;
        open.close();
        let open = open_sim(&disk, &store_on(self.volumes));
        assert_eq!(
            open.core.stats().unwrap().used_bytes,
            used,
            "{what}: the used space must not change at the next opening"
        );
        open.close();
    }
}

#[test]
fn damage_costs_only_the_damaged_pages() {
    for volumes in [1, 2, 4] {
        let fixture = Fixture::new(volumes);
        for (turn, kind) in DAMAGE_KINDS.into_iter().enumerate() {
            fixture.check(kind, (turn % volumes) as u8, turn % 2 == volumes / 2 % 2);
        }
    }
}
