//! Small caches, and pages whose bytes are derived from their key, so that every byte read can be
//! checked.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test file uses its own part")]

pub mod remote_fixture;

use ritornello_format::{Result, Scope};
use ritornello_node::Node;
use ritornello_store::{Catalog, ClientId, Outcome, PutOptions};
use ritornello_tiers::Tier;
use ritornello_tiers::cache::{
    Cache, Lookup, LookupOptions, PrefetchPolicy, Readiness, Settings, TierSpec, TierStats,
};
use ritornello_tiers::remote::{Backend, DirectoryBackend, MemoryBackend, RemoteTier};
use ritornello_volume::page_memory::{BorrowedPages, OwnedPagesMut, PageTarget};
use ritornello_volume::transfer::Control;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Bytes per page: not a multiple of 4,096, so that stores pad pages.
pub const PAGE: usize = 20_000;
pub const TTL: Duration = Duration::from_secs(30);

pub fn scope() -> Arc<Scope> {
    Arc::new(Scope::opaque("tiers", PAGE as u64, true))
}

/// Returns the keys of the first `pages` pages of prompt `number`, which begins with the first
/// `fork` pages of prompt 0.
pub fn keys(number: u8, fork: usize, pages: usize) -> Vec<Vec<u8>> {
    // A key commits to all pages before it, so the keys after the fork contain the fork's position.
    let own = |at: usize| if at < fork { [0; 2] } else { [number, fork as u8] };
    let key = |at: usize| [own(at).repeat(12), (at as u64).to_le_bytes().to_vec()].concat();
    (0..pages).map(key).collect()
}

pub fn refs(of: &[Vec<u8>]) -> Vec<&[u8]> {
    of.iter().map(Vec::as_slice).collect()
}

pub fn boxed(of: &[Vec<u8>]) -> Vec<Box<[u8]>> {
    of.iter().map(|key| key.as_slice().into()).collect()
}

pub fn page(key: &[u8]) -> Vec<u8> {
    let mut page = Vec::with_capacity(PAGE + key.len());
    for turn in 0..PAGE.div_ceil(key.len()) {
        page.extend(key.iter().map(|byte| byte ^ turn as u8));
    }
    page.truncate(PAGE);
    page
}

pub fn host(dir: &TempDir, mib: u64) -> String {
    format!("host {mib}MiB {}/host", dir.path().display())
}

pub fn disk(dir: &TempDir, mib: u64) -> String {
    format!("disk {}/disk {mib}MiB", dir.path().display())
}

pub fn remote(dir: &Path) -> String {
    format!("file://{}", dir.display())
}

/// Opens the remote in the directory of a `file://` address, or for any other address a new remote
/// in memory.
pub fn open_remote(address: &str) -> Result<RemoteTier> {
    Ok(RemoteTier::new(match address.strip_prefix("file://") {
        Some(dir) => Arc::new(DirectoryBackend::new(Path::new(dir), "test")),
        None => Arc::new(MemoryBackend::default()),
    }))
}

pub fn open(list: &[&str]) -> Cache {
    open_with(list, PrefetchPolicy::WaitComplete)
}

pub fn open_with(list: &[&str], prefetch: PrefetchPolicy) -> Cache {
    let settings = Settings { prefetch, ..Settings::default() };
    Cache::open(&TierSpec::list(list).unwrap(), &settings, open_remote).unwrap()
}

pub fn open_over(list: &[&str], settings: &Settings, over: Arc<dyn Backend>) -> Cache {
    Cache::open(&TierSpec::list(list).unwrap(), settings, |_| {
        Ok(RemoteTier::new(Arc::clone(&over)))
    })
    .unwrap()
}

/// Puts pages `first..` of the prompt with these keys. Returns how many leading pages of `first..`
/// are on the first tier afterwards.
pub fn put(cache: &Cache, keys: &[Vec<u8>], first: usize) -> usize {
    let pages: Vec<Vec<u8>> = keys[first..].iter().map(|key| page(key)).collect();
    let source = BorrowedPages::new(&refs(&pages));
    let ticket = cache
        .submit_put_copy(
            scope(),
            boxed(keys),
            first,
            &source,
            PutOptions::default(),
            Control::default(),
        )
        .unwrap();
    ticket.wait(Some(Duration::from_secs(60))).unwrap().pages
}

/// Looks up a prompt once.
pub fn find_once(cache: &Cache, keys: &[Vec<u8>]) -> Lookup {
    cache.lookup(&scope(), &refs(keys), TTL, &LookupOptions::default()).unwrap()
}

/// Looks up a prompt until the answer is final.
pub fn find(cache: &Cache, keys: &[Vec<u8>]) -> Lookup {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let found = find_once(cache, keys);
        if found.readiness == Readiness::Ready {
            return found;
        }
        assert!(Instant::now() < until, "the lookup stays pending");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Leases pages as a read does, because the limit on a client's leases does not apply to reads. The
/// store in `dir` must be open in this process as its owner. The returned handle must be dropped
/// before the cache closes.
pub fn begin_read(dir: &Path, keys: &[Vec<u8>]) -> Arc<Node> {
    let node = ritornello_node::open(&ritornello_node::Options::new(dir)).unwrap();
    let catalog = node.core().unwrap().catalog_for(ClientId::LOCAL, "");
    let reference = catalog.resolve(&scope(), false).unwrap().unwrap();
    assert!(!catalog.begin_read(reference, &refs(keys)).unwrap().runs.is_empty());
    node
}

pub fn release(cache: &Cache, found: &Lookup) {
    found.leases.iter().for_each(|lease| cache.release(*lease).unwrap());
}

pub fn spans(found: &Lookup) -> Vec<(Tier, usize)> {
    found.spans.iter().map(|span| (span.tier, span.pages)).collect()
}

/// Reads pages `first..`, and checks the bytes of every page reported as read.
pub fn get(cache: &Cache, keys: &[Vec<u8>], first: usize) -> Arc<Outcome> {
    let target = Arc::new(OwnedPagesMut::new(vec![vec![0xa5; PAGE]; keys.len() - first]));
    let parent = first.checked_sub(1).map(|before| keys[before].as_slice().into());
    let ticket = cache
        .submit_get(
            scope(),
            boxed(&keys[first..]),
            parent,
            Arc::clone(&target) as Arc<dyn PageTarget>,
            Control::default(),
        )
        .unwrap();
    let outcome = ticket.wait(Some(Duration::from_secs(60))).unwrap();
    let mut target = target;
    let read = loop {
        // The reading thread releases the target shortly after it completes the ticket.
        match Arc::try_unwrap(target) {
            Ok(target) => break target.into_inner(),
            Err(held) => target = held,
        }
        std::thread::yield_now();
    };
    for (at, ok) in outcome.ok.iter().enumerate() {
        assert!(!ok || read[at] == page(&keys[first + at]), "different bytes in page {at}");
    }
    outcome
}

/// Returns whether pages `first..` can all be read.
pub fn reads(cache: &Cache, keys: &[Vec<u8>], first: usize) -> bool {
    get(cache, keys, first).pages == keys.len() - first
}

pub fn tier(cache: &Cache, name: &str) -> TierStats {
    cache.stats().unwrap().tiers.into_iter().find(|tier| tier.tier == name).unwrap()
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendFault {
    #[default]
    None,
    Fails,
    /// Calls do not return until the fault is cleared.
    Hangs,
    /// Reads return half of the requested bytes.
    Short,
}

/// A remote in memory with injectable faults.
#[derive(Debug, Default)]
pub struct FaultyRemote {
    pub inner: MemoryBackend,
    fault: parking_lot::Mutex<BackendFault>,
    changed: parking_lot::Condvar,
    pub gets: std::sync::atomic::AtomicUsize,
}

impl FaultyRemote {
    pub fn set_fault(&self, fault: BackendFault) {
        *self.fault.lock() = fault;
        self.changed.notify_all();
    }

    fn inject(&self) -> Result<BackendFault> {
        let mut fault = self.fault.lock();
        while *fault == BackendFault::Hangs {
            self.changed.wait(&mut fault);
        }
        match *fault {
            BackendFault::Fails => Err(ritornello_format::Error::retry("503")),
            other => Ok(other),
        }
    }
}

impl Backend for FaultyRemote {
    fn get(&self, name: &str, range: Option<std::ops::Range<u64>>) -> Result<Option<Vec<u8>>> {
        self.gets.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let fault = self.inject()?;
        let value = self.inner.get(name, range)?;
        Ok(value.map(|mut value| {
            if fault == BackendFault::Short {
                value.truncate(value.len() / 2);
            }
            value
        }))
    }
    fn exists(&self, name: &str) -> Result<bool> {
        self.inject()?;
        self.inner.exists(name)
    }
    fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        self.inject()?;
        self.inner.set(name, value)
    }
}

/// Waits until `reached` returns true; fails after 60 seconds. `what` describes the awaited event.
pub fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !reached() {
        assert!(Instant::now() < end, "did not happen within 60 s: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
