//! Objects whose header or listing claims a false length: no fetch is as long as the claim, and the
//! object is rejected.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use ritornello_format::{PAGE_BYTES_MAX, Result, RunHeader, ScopeId, UNIT};
use ritornello_tiers::remote::{
    Backend, Inventory, Listed, MemoryBackend, Prompt, RemoteTier, fsck,
};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const SCOPE: ScopeId = ScopeId([9; 16]);
const PAGE: usize = 4096;
const PAGES: usize = 4;

/// A memory backend that records the longest range requested.
#[derive(Debug, Default)]
struct RangeRecorder {
    inner: MemoryBackend,
    longest_range: AtomicU64,
    /// The length that listings report instead of the actual length.
    listed: Option<u64>,
}

impl Backend for RangeRecorder {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>> {
        let bytes = range.as_ref().map_or(u64::MAX, |range| range.end - range.start);
        self.longest_range.fetch_max(bytes, Relaxed);
        self.inner.get(name, range)
    }

    fn exists(&self, name: &str) -> Result<bool> {
        self.inner.exists(name)
    }

    fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        self.inner.set(name, value)
    }

    fn list(&self, prefix: &str, each: &mut dyn FnMut(Listed)) -> Result<()> {
        self.inner.list(prefix, &mut |mut found| {
            found.bytes = self.listed.unwrap_or(found.bytes);
            each(found);
        })
    }
}

fn keys() -> Vec<Vec<u8>> {
    (0..PAGES as u8).map(|at| vec![at; 32]).collect()
}

fn with_prompt<T>(run: impl FnOnce(&Prompt<'_>, Instant) -> T) -> T {
    let keys = keys();
    let refs: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    let prompt = Prompt { scope: &SCOPE, page_bytes: PAGE as u64, chained: true, keys: &refs };
    run(&prompt, Instant::now() + Duration::from_secs(60))
}

/// Writes the only object of a prompt. `forge` changes its header, whose checksum is then
/// corrected.
fn forged(backend: &Arc<RangeRecorder>, forge: impl FnOnce(&mut RunHeader)) -> String {
    let tier = RemoteTier::new(Arc::clone(backend) as Arc<dyn Backend>);
    let page = vec![7; PAGE];
    assert_eq!(with_prompt(|p, until| tier.put(p, 0..PAGES, |_| &page, until)).unwrap(), PAGES);
    let name = Inventory::take(&backend.inner).unwrap().objects[0].name.clone();
    let mut object = backend.inner.get(&name, None).unwrap().unwrap();
    let (mut header, _) = RunHeader::decode(&object).unwrap();
    forge(&mut header);
    let (encoded, _) = header.encode().unwrap();
    object[..UNIT as usize].fill(0);
    object[..encoded.len()].copy_from_slice(&encoded);
    backend.inner.set(&name, &object).unwrap();
    name
}

fn get(backend: &Arc<RangeRecorder>, range: Range<usize>) -> usize {
    let tier = RemoteTier::new(Arc::clone(backend) as Arc<dyn Backend>);
    let mut out = vec![0; range.len() * PAGE];
    with_prompt(|prompt, until| tier.get(prompt, range, &mut out, until)).unwrap()
}

#[test]
fn slice_longer_than_a_page_is_not_fetched() {
    for claimed in [PAGE as u32 + 1, 800 << 20, u32::MAX] {
        let backend = Arc::new(RangeRecorder::default());
        forged(&backend, |header| {
            header.slices[2].bytes = claimed;
            header.slices[2].codec = 128;
        });
        assert_eq!(get(&backend, 2..3), 0);
        let fetched = backend.longest_range.load(Relaxed);
        assert!(fetched <= (PAGES * PAGE) as u64 + 2 * UNIT, "{fetched} bytes for {claimed}");
    }
}

#[test]
fn pages_longer_than_the_scope_are_not_fetched() {
    let backend = Arc::new(RangeRecorder::default());
    forged(&backend, |header| {
        header.page_bytes = 64 << 20;
        header.slices.iter_mut().for_each(|slice| (slice.bytes, slice.codec) = (64 << 20, 128));
    });
    assert_eq!(get(&backend, 1..2), 0);
    assert!(backend.longest_range.load(Relaxed) <= (PAGES * PAGE) as u64 + 2 * UNIT);
}

#[test]
fn fsck_reads_no_more_than_an_object_can_hold() {
    let backend = Arc::new(RangeRecorder { listed: Some(5 << 40), ..RangeRecorder::default() });
    forged(&backend, |_| {});
    let inventory = Inventory::take(backend.as_ref()).unwrap();
    let found = fsck(backend.as_ref(), &inventory, None, false, &mut |_| {}).unwrap();
    assert!(
        backend.longest_range.load(Relaxed) <= PAGE_BYTES_MAX + (1 << 20),
        "{}",
        backend.longest_range.load(Relaxed)
    );
    assert!(found.damaged[0].1.contains("longer than"), "{:?}", found.damaged);
}

#[test]
fn header_with_too_many_pages_is_rejected() {
    let backend = Arc::new(RangeRecorder::default());
    let name = forged(&backend, |header| {
        // An object has at most 8 MiB, or one longer page.
        header.page_bytes = 64 << 20;
        header.slices.iter_mut().for_each(|slice| (slice.bytes, slice.codec) = (64, 128));
    });
    let inventory = Inventory::take(backend.as_ref()).unwrap();
    let found = fsck(backend.as_ref(), &inventory, None, false, &mut |_| {}).unwrap();
    assert_eq!(found.damaged[0].0, name);
    assert!(found.damaged[0].1.contains("more pages"), "{:?}", found.damaged);
}
