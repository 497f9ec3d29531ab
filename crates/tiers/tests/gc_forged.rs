//! Garbage collection of a remote with forged headers.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use ritornello_format::{PageHash, Result, RunHeader, ScopeId, Slice, UNIT};
use ritornello_tiers::remote::{
    Backend, CollectOptions, Inventory, KeyRing, Listed, MemoryBackend, Prompt, RemoteOptions,
    RemoteTier, collect,
};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;

/// Returns the header of a run of one page of one byte, with `parent` as the key of the page before
/// it.
fn header(scope: ScopeId, parent: Vec<u8>, key: Vec<u8>) -> Vec<u8> {
    let header = RunHeader {
        scope,
        page_bytes: 1,
        header_units: 1,
        page_units: 1,
        parent: Some(parent),
        keys: [key].iter().collect(),
        slices_per_page: 1,
        slices: vec![Slice { bytes: 1, codec: 0, checksum: 0 }],
        ..RunHeader::default()
    };
    header.encode().unwrap().0
}

fn hex(hash: PageHash) -> String {
    hash.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn gc_of_20000_circular_headers_ends_within_10_s() {
    let (backend, scope) = (MemoryBackend::default(), ScopeId([5; 16]));
    for number in 0..20_000_u32 {
        let key = number.to_le_bytes().repeat(8);
        let mut value = header(scope, key.clone(), key.clone());
        value.resize(UNIT as usize, 0);
        let hash = hex(PageHash::of(&scope, &key));
        backend.set(&format!("ritornello/3/{scope}/{hash}.1"), &value).unwrap();
    }
    let options =
        CollectOptions { max_age: None, budget: Some(0), grace: Duration::ZERO, dry_run: true };
    let begun = Instant::now();
    collect(&backend, &options, None, &mut |_| {}).unwrap();
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(10), "gc of 20,000 objects took {took:?}");
}

/// A backend that lists each object with the time of writing that the test sets for the object.
#[derive(Debug, Default)]
struct Dated(MemoryBackend, Mutex<HashMap<String, u64>>);

impl Backend for Dated {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>> {
        self.0.get(name, range)
    }

    fn exists(&self, name: &str) -> Result<bool> {
        self.0.exists(name)
    }

    fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        self.0.set(name, value)
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.0.delete(name)
    }

    fn list(&self, prefix: &str, each: &mut dyn FnMut(Listed)) -> Result<()> {
        self.0.list(prefix, &mut |found| {
            let written = self.1.lock().unwrap().get(&found.name).copied().unwrap_or(10_000);
            each(Listed { written, ..found });
        })
    }
}

#[test]
fn forged_header_does_not_choose_what_gc_removes() {
    let backend = Arc::new(Dated::default());
    let ring = Arc::new(KeyRing::parse(&format!("a {}", "0a".repeat(32))).unwrap());
    let tier = RemoteTier::with_options(
        Arc::clone(&backend) as Arc<dyn Backend>,
        RemoteOptions { zstd: None, keys: Some(Arc::clone(&ring)) },
    );
    let page = [3_u8; PAGE];
    let mut names = Vec::new();
    for (n, written) in [(1_u8, 1000), (2, 2000)] {
        let (scope, key) = (ScopeId([n; 16]), [n; 32]);
        let prompt =
            Prompt { scope: &scope, page_bytes: PAGE as u64, chained: true, keys: &[&key] };
        let until = Instant::now() + Duration::from_secs(60);
        assert_eq!(tier.put(&prompt, 0..1, |_| &page, until).unwrap(), 1);
        let objects = Inventory::take(backend.as_ref()).unwrap().objects;
        let mine = |object: &&ritornello_tiers::remote::Object| object.scope == scope.to_string();
        let name = objects.iter().find(mine).unwrap().name.clone();
        backend.1.lock().unwrap().insert(name.clone(), written);
        names.push(name);
    }
    // An object without a valid seal claims to continue the older object.
    let (scope, key) = (ScopeId([1; 16]), vec![7; 32]);
    let encoded = header(scope, vec![1; 32], key.clone());
    let mut forged = b"RTRNSEAL".to_vec();
    for number in [1, encoded.len() as u32, 1] {
        forged.extend(number.to_le_bytes());
    }
    forged.extend([0; 16 + 32]);
    forged.extend(encoded);
    forged.extend([0; 32]);
    let name = format!("ritornello/4/{scope}/{}.1", hex(PageHash::of(&scope, &key)));
    backend.set(&name, &forged).unwrap();
    backend.1.lock().unwrap().insert(name, 9000);
    let bytes = Inventory::take(backend.as_ref()).unwrap().bytes();
    let budget = Some(bytes - 1);
    let options = CollectOptions { max_age: None, budget, grace: Duration::ZERO, dry_run: false };
    collect(backend.as_ref(), &options, Some(&ring), &mut |_| {}).unwrap();
    assert!(backend.exists(&names[1]).unwrap(), "the younger object was removed");
    assert!(!backend.exists(&names[0]).unwrap(), "the older object stayed");
}
