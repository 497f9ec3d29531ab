//! Scopes whose keys do not chain: a remote stores each page as a separate object, and a lookup
//! finds and fetches any of the pages.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::{Error, Result, Scope};
use ritornello_store::{Outcome, PutOptions};
use ritornello_tiers::Tier;
use ritornello_tiers::cache::{Cache, Lookup, LookupOptions, Readiness, Settings};
use ritornello_tiers::remote::{Backend, MemoryBackend};
use ritornello_volume::page_memory::{BorrowedPages, OwnedPagesMut, PageTarget};
use ritornello_volume::transfer::Control;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tempfile::tempdir;

fn apart() -> Arc<Scope> {
    Arc::new(Scope::opaque("apart", PAGE as u64, false))
}

/// Returns the keys of the pages with these numbers.
fn some(pages: impl IntoIterator<Item = usize>) -> Vec<Vec<u8>> {
    let all = keys(1, 0, 100);
    pages.into_iter().map(|page| all[page].clone()).collect()
}

fn store(cache: &Cache, keys: &[Vec<u8>], parent: Option<&[u8]>) {
    let pages: Vec<Vec<u8>> = keys.iter().map(|key| page(key)).collect();
    let source = BorrowedPages::new(&refs(&pages));
    let (options, control) = (PutOptions::after(parent), Control::default());
    let put = cache.submit_put_copy(apart(), boxed(keys), 0, &source, options, control).unwrap();
    assert_eq!(put.wait(Some(TTL)).unwrap().pages, keys.len());
}

fn look_once(cache: &Cache, keys: &[Vec<u8>]) -> Lookup {
    cache.lookup(&apart(), &refs(keys), TTL, &LookupOptions::default()).unwrap()
}

/// Looks up pages until the answer is final.
fn look(cache: &Cache, keys: &[Vec<u8>]) -> Lookup {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let found = look_once(cache, keys);
        if found.readiness == Readiness::Ready {
            return found;
        }
        assert!(Instant::now() < until, "the lookup stays pending");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn exist(cache: &Cache, keys: &[Vec<u8>]) -> Vec<bool> {
    cache.exists(&apart(), &refs(keys)).unwrap()
}

/// Loads pages, and checks the bytes of the loaded pages.
fn load(cache: &Cache, keys: &[Vec<u8>]) -> Arc<Outcome> {
    let target = Arc::new(OwnedPagesMut::new(vec![vec![0xa5; PAGE]; keys.len()]));
    let out = Arc::clone(&target) as Arc<dyn PageTarget>;
    let get = cache.submit_get(apart(), boxed(keys), None, out, Control::default()).unwrap();
    let outcome = get.wait(Some(TTL)).unwrap();
    until("the read releases its memory", || Arc::strong_count(&target) == 1);
    let read = Arc::try_unwrap(target).unwrap().into_inner();
    for (at, ok) in outcome.ok.iter().enumerate() {
        assert!(!ok || read[at] == page(&keys[at]), "different bytes in page {at}");
    }
    outcome
}

fn over(dir: &tempfile::TempDir, remote: &Arc<FaultyRemote>) -> Cache {
    let remote = Arc::clone(remote) as Arc<dyn Backend>;
    let settings = Settings {
        prefetch: ritornello_tiers::cache::PrefetchPolicy::WaitComplete,
        ..Settings::default()
    };
    open_over(&[&disk(dir, 64), "memory:"], &settings, remote)
}

fn objects(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(objects(&path)),
            false => found.push(path),
        }
    }
    found
}

#[test]
fn other_machine_finds_any_subset_of_pages() {
    let (one, two, far) = (tempdir().unwrap(), tempdir().unwrap(), tempdir().unwrap());
    {
        let cache = open(&[&disk(&one, 64), &remote(far.path())]);
        store(&cache, &some([1, 2, 5]), None);
        store(&cache, &some([7, 8]), Some(&some([6])[0]));
        cache.flush().unwrap();
        let stats = tier(&cache, "remote");
        assert_eq!((stats.written_pages, stats.dropped_pages, stats.lost_pages), (5, 0, 0));
    }
    let written = objects(far.path());
    let is_page = |path: &PathBuf| path.to_str().unwrap().ends_with(".1");
    assert_eq!(
        written.iter().filter(|path| is_page(path)).count(),
        5,
        "each page must be one object"
    );
    let cache = open(&[&disk(&two, 64), &remote(far.path())]);
    store(&cache, &some([3]), None);
    let wanted = some(0..10);
    let first = look_once(&cache, &wanted);
    assert_ne!(first.readiness, Readiness::Ready, "a lookup must not wait for the remote");
    let found = look(&cache, &wanted);
    assert_eq!((found.local, found.load, found.fetched), (6, 6, 5));
    assert_eq!(spans(&found), [(Tier::Disk, 6)]);
    let present: Vec<bool> = (0..10).map(|page| [1, 2, 3, 5, 7, 8].contains(&page)).collect();
    assert_eq!(exist(&cache, &wanted), present);
    assert_eq!(load(&cache, &wanted).ok, present);
    assert!(!found.leases.is_empty());
    release(&cache, &found);
    let prefetch = cache.stats().unwrap().prefetch;
    assert_eq!((prefetch.pages, prefetch.completed), (5, 1));
}

#[test]
fn leases_cover_pages_behind_a_missing_page() {
    let dir = tempdir().unwrap();
    let cache = open(&[&disk(&dir, 64)]);
    store(&cache, &some(1..4), None);
    let found = look(&cache, &some(0..4));
    assert_eq!((found.local, found.load, found.leases.len()), (3, 3, 1));
    let node = ritornello_node::open(&ritornello_node::Options::new(dir.path().join("disk")));
    let leases = || node.as_ref().unwrap().store().stats().unwrap().catalog.leases;
    assert_eq!(leases(), 1);
    release(&cache, &found);
    assert_eq!(leases(), 0);
}

#[test]
fn damaged_object_costs_only_its_page() {
    let (one, two, far) = (tempdir().unwrap(), tempdir().unwrap(), tempdir().unwrap());
    {
        let cache = open(&[&disk(&one, 64), &remote(far.path())]);
        store(&cache, &some(0..30), None);
        cache.flush().unwrap();
    }
    let mut pages = objects(far.path());
    pages.retain(|path| path.to_str().unwrap().ends_with(".1"));
    // Flip a bit in each of two objects, and truncate the first object by 100 bytes.
    for (path, cut) in [(&pages[0], 100), (&pages[1], 0)] {
        let mut bytes = fs::read(path).unwrap();
        let end = bytes.len() - cut;
        bytes[end - PAGE / 2] ^= 1;
        fs::write(path, &bytes[..end]).unwrap();
    }
    let cache = open(&[&disk(&two, 64), &remote(far.path())]);
    let found = look(&cache, &some(0..30));
    assert_eq!((found.local, found.fetched), (28, 28));
    release(&cache, &found);
    let outcome = load(&cache, &some(0..30));
    assert_eq!(outcome.ok.iter().filter(|ok| **ok).count(), 28);
}

#[test]
fn pages_of_overlapping_lookups_are_fetched_once() {
    let (one, two, remote) =
        (tempdir().unwrap(), tempdir().unwrap(), Arc::new(FaultyRemote::default()));
    {
        let cache = over(&one, &remote);
        store(&cache, &some(0..40), None);
        cache.flush().unwrap();
    }
    remote.gets.store(0, Relaxed);
    let cache = over(&two, &remote);
    // The key lists of two lookups end with the same key, and are still looked up separately.
    let (all, few) = (some(0..40), some([3, 9, 39]));
    remote.set_fault(BackendFault::Hangs);
    assert_eq!(look_once(&cache, &all).readiness, Readiness::Querying);
    assert_eq!(look_once(&cache, &few).readiness, Readiness::Querying);
    remote.set_fault(BackendFault::None);
    let (all, few) = (look(&cache, &all), look(&cache, &few));
    assert_eq!((all.local, few.local), (40, 3));
    assert_eq!(remote.gets.load(Relaxed), 40);
}

#[test]
fn cancelled_prefetch_of_unchained_pages_stops() {
    let (one, two, remote) =
        (tempdir().unwrap(), tempdir().unwrap(), Arc::new(FaultyRemote::default()));
    {
        let cache = over(&one, &remote);
        store(&cache, &some(0..20), None);
        cache.flush().unwrap();
    }
    let cache = over(&two, &remote);
    remote.set_fault(BackendFault::Hangs);
    let (ours, theirs) = (some(0..20), some(5..20));
    assert_eq!(look_once(&cache, &ours).readiness, Readiness::Querying);
    assert!(
        !cache.cancel(&apart(), &refs(&theirs)).unwrap(),
        "another list of keys must not cancel this prefetch"
    );
    assert!(cache.cancel(&apart(), &refs(&ours)).unwrap());
    remote.set_fault(BackendFault::None);
    until("the prefetch ends", || cache.stats().unwrap().prefetch.running == 0);
    assert_eq!(cache.stats().unwrap().prefetch.pages, 0);
    assert!(!exist(&cache, &ours).contains(&true));
}

#[test]
fn unreachable_remote_costs_only_hits() {
    let (dir, remote) = (tempdir().unwrap(), Arc::new(FaultyRemote::default()));
    let cache = over(&dir, &remote);
    remote.set_fault(BackendFault::Fails);
    store(&cache, &some(0..5), None);
    let found = look(&cache, &some(0..10));
    assert_eq!((found.local, load(&cache, &some(0..5)).pages), (5, 5));
    release(&cache, &found);
    cache.flush().unwrap();
    assert_eq!(tier(&cache, "remote").dropped_pages, 5);
}

#[test]
fn write_policies_move_each_unchained_page() {
    for policy in ["write_through", "selective(2)", "write_back"] {
        let (dir, far) = (tempdir().unwrap(), tempdir().unwrap());
        let remote = format!("{} write={policy}", remote(far.path()));
        let cache = open(&[&disk(&dir, 64), &remote]);
        store(&cache, &some(1..7), None);
        // Two lookups with different lists count as two hits of each page.
        for list in [some(0..7), some((0..7).rev())] {
            let found = look(&cache, &list);
            release(&cache, &found);
        }
        cache.flush().unwrap();
        let stats = tier(&cache, "remote");
        assert_eq!((stats.written_pages, stats.dropped_pages), (6, 0), "{policy}");
    }
}

#[test]
fn evicted_page_does_not_stop_the_write_of_others() {
    let (dir, remote) = (tempdir().unwrap(), Arc::new(FaultyRemote::default()));
    let cache = over(&dir, &remote);
    remote.set_fault(BackendFault::Hangs);
    store(&cache, &some([50]), None);
    store(&cache, &some(0..9), None);
    let node = ritornello_node::open(&ritornello_node::Options::new(dir.path().join("disk")));
    assert_eq!(node.unwrap().store().delete(&apart(), &refs(&some([0, 4]))).unwrap(), 2);
    remote.set_fault(BackendFault::None);
    cache.flush().unwrap();
    let stats = tier(&cache, "remote");
    assert_eq!((stats.written_pages, stats.lost_pages, stats.dropped_pages), (8, 2, 0));
}

/// A remote that refuses the objects of some pages.
#[derive(Debug, Default)]
struct RefusingRemote {
    inner: MemoryBackend,
    refused: Vec<Vec<u8>>,
    sets: AtomicUsize,
}

impl RefusingRemote {
    fn new(refused: Vec<Vec<u8>>) -> Arc<Self> {
        Arc::new(Self { refused, ..Self::default() })
    }

    fn cache(self: &Arc<Self>, dir: &tempfile::TempDir) -> Cache {
        let remote = Arc::clone(self) as Arc<dyn Backend>;
        open_over(&[&disk(dir, 64), "memory:"], &Settings::default(), remote)
    }
}

impl Backend for RefusingRemote {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>> {
        self.inner.get(name, range)
    }
    fn exists(&self, name: &str) -> Result<bool> {
        self.inner.exists(name)
    }
    fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        self.sets.fetch_add(1, Relaxed);
        // The header, which is within the first 4,096 bytes of the object, holds the page's key.
        let is_in = |key: &Vec<u8>| value[..4096].windows(key.len()).any(|bytes| bytes == key);
        match self.refused.iter().any(is_in) {
            true => Err(Error::retry("503")),
            false => self.inner.set(name, value),
        }
    }
}

#[test]
fn failed_object_does_not_stop_the_write_of_others() {
    // The put has more pages than one call writes to the remote.
    let (dir, keys) = (tempdir().unwrap(), keys(1, 0, 600));
    let remote = RefusingRemote::new([3, 4, 550].map(|page| keys[page].clone()).to_vec());
    let cache = remote.cache(&dir);
    store(&cache, &keys, None);
    cache.flush().unwrap();
    let stats = tier(&cache, "remote");
    assert_eq!((stats.written_pages, stats.lost_pages, stats.dropped_pages), (597, 0, 3));
}

#[test]
fn remote_that_refuses_all_objects_ends_the_write() {
    let dir = tempdir().unwrap();
    let remote = RefusingRemote::new(some(0..100));
    let cache = remote.cache(&dir);
    store(&cache, &some(0..100), None);
    cache.flush().unwrap();
    let stats = tier(&cache, "remote");
    assert_eq!((stats.written_pages, stats.dropped_pages), (0, 100));
    // When four objects have failed, at most four further writes have begun. Each of these at most
    // eight writes is tried at most three times.
    let sets = remote.sets.load(Relaxed);
    assert!(sets <= (4 + 4) * 3, "{sets} attempts for 100 objects");
}
