//! A remote with untrusted writers: with a key, only pages written by a holder of the key are
//! delivered, and rejected objects are written again.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use ritornello_format::{RUN_MAGIC, RunHeader, ScopeId, SliceChecksum};
use ritornello_tiers::cache::{Cache, Settings, TierSpec};
use ritornello_tiers::remote::{
    Backend, CollectOptions, Form, Inventory, KeyRing, MemoryBackend, Prompt, RejectedObjects,
    RemoteOptions, RemoteStats, RemoteTier, collect, fsck,
};
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SCOPE: ScopeId = ScopeId([9; 16]);
const OTHER: ScopeId = ScopeId([8; 16]);
const PAGE: usize = 4096;
/// Number of pages of the prompt, which make objects of 128, 16, 4, 2 and 1 pages.
const PAGES: usize = 151;

/// Returns a key ring with one key for each letter of `ids`, which is the key's id.
fn ring(ids: &str) -> Arc<KeyRing> {
    let line = |id: char| format!("{id} {}\n", format!("{:02x}", id as u8).repeat(32));
    Arc::new(KeyRing::parse(&ids.chars().map(line).collect::<String>()).unwrap())
}

fn keys() -> Vec<Vec<u8>> {
    (0..PAGES as u32).map(|at| at.to_le_bytes().repeat(8)).collect()
}

fn page(scope: &ScopeId, at: usize) -> Vec<u8> {
    (0..PAGE).map(|byte| (byte / 7) as u8 ^ at as u8 ^ scope.0[0]).collect()
}

struct TestRemote {
    backend: Arc<MemoryBackend>,
    zstd: Option<i32>,
}

impl TestRemote {
    fn new() -> Self {
        Self { backend: Arc::default(), zstd: None }
    }

    /// Returns the tier of a process that has the keys of [`ring`]`(ids)`; without keys if `ids` is
    /// empty.
    fn tier(&self, ids: &str) -> RemoteTier {
        let keys = (!ids.is_empty()).then(|| ring(ids));
        let options = RemoteOptions { zstd: self.zstd, keys };
        RemoteTier::with_options(Arc::clone(&self.backend) as Arc<dyn Backend>, options)
    }

    fn names(&self) -> Vec<String> {
        let inventory = Inventory::take(self.backend.as_ref()).unwrap();
        inventory.objects.into_iter().map(|object| object.name).collect()
    }

    fn name(&self, scope: &ScopeId, pages: usize) -> String {
        let (scope, end) = (scope.to_string(), format!(".{pages}"));
        self.names().into_iter().find(|n| n.contains(&scope) && n.ends_with(&end)).unwrap()
    }

    fn value(&self, name: &str) -> Vec<u8> {
        self.backend.get(name, None).unwrap().unwrap()
    }
}

fn with_prompt<T>(scope: &ScopeId, run: impl FnOnce(&Prompt<'_>, Instant) -> T) -> T {
    let keys = keys();
    let refs: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    let prompt = Prompt { scope, page_bytes: PAGE as u64, chained: true, keys: &refs };
    run(&prompt, Instant::now() + Duration::from_secs(60))
}

fn put(tier: &RemoteTier, scope: &ScopeId) -> RemoteStats {
    let pages: Vec<Vec<u8>> = (0..PAGES).map(|at| page(scope, at)).collect();
    let present = with_prompt(scope, |p, until| tier.put(p, 0..PAGES, |at| &pages[at], until));
    assert_eq!(present.unwrap(), PAGES);
    tier.stats()
}

/// Reads pages and checks their bytes. Returns how many were read.
fn get(tier: &RemoteTier, scope: &ScopeId, range: Range<usize>) -> usize {
    let mut out = vec![0; range.len() * PAGE];
    let read = with_prompt(scope, |p, until| tier.get(p, range.clone(), &mut out, until)).unwrap();
    for (at, out) in range.zip(out.chunks(PAGE)).take(read) {
        assert!(out == page(scope, at), "page {at} has different bytes");
    }
    read
}

/// An object, parsed into its parts. A writer without the key can parse it too.
struct ParsedObject {
    object: Vec<u8>,
    header: RunHeader,
    /// Offset of the run header in the object.
    at: usize,
    /// Offset of the first page in the object.
    begin: usize,
}

impl ParsedObject {
    fn new(object: Vec<u8>) -> Self {
        let at = object.windows(8).position(|eight| eight == RUN_MAGIC).unwrap();
        let (header, _) = RunHeader::decode(&object[at..]).unwrap();
        let stored: usize = header.slices.iter().map(|slice| slice.bytes as usize).sum();
        let begin = object.len() - stored;
        Self { object, header, at, begin }
    }

    fn stored_range(&self, page: usize) -> Range<usize> {
        let lengths = self.header.slices.iter().map(|slice| slice.bytes as usize);
        let from = self.begin + lengths.clone().take(page).sum::<usize>();
        from..from + self.header.slices[page].bytes as usize
    }

    /// Replaces the stored bytes of a page by different bytes of the same length.
    fn replace(&mut self, page: usize, bytes: &[u8]) {
        let place = self.stored_range(page);
        self.object[place].copy_from_slice(bytes);
    }

    /// The object with all checksums corrected.
    fn assemble(mut self) -> Vec<u8> {
        for page in 0..self.header.keys.len() {
            let mut sum = SliceChecksum::new(&self.header.keys[page], 0, 0);
            sum.update(&self.object[self.stored_range(page)]);
            self.header.slices[page].checksum = sum.finish();
        }
        let (encoded, _) = self.header.encode().unwrap();
        self.object[self.at..self.at + encoded.len()].copy_from_slice(&encoded);
        self.object
    }
}

/// Replaces page 5 of the object `name`, and corrects all checksums.
fn forge(remote: &TestRemote, name: &str) {
    let mut parsed = ParsedObject::new(remote.value(name));
    parsed.replace(5, &[66; PAGE]);
    remote.backend.set(name, &parsed.assemble()).unwrap();
}

#[test]
fn forged_page_is_delivered_without_a_key() {
    let remote = TestRemote::new();
    put(&remote.tier(""), &SCOPE);
    forge(&remote, &remote.name(&SCOPE, 128));
    let mut out = vec![0; PAGE];
    let read = |p: &Prompt<'_>, until| remote.tier("").get(p, 5..6, &mut out, until);
    assert_eq!(with_prompt(&SCOPE, read).unwrap(), 1);
    assert_eq!(
        out, [66; PAGE],
        "a reader without a key verifies only checksums, so it must accept the forged page"
    );
}

#[test]
fn forged_page_is_a_miss_and_rewritten() {
    let remote = TestRemote::new();
    put(&remote.tier("a"), &SCOPE);
    let name = remote.name(&SCOPE, 128);
    let good = remote.value(&name);
    forge(&remote, &name);
    let tier = remote.tier("a");
    assert_eq!(get(&tier, &SCOPE, 0..PAGES), 0);
    assert_eq!(tier.stats().rejected, RejectedObjects { wrong_tag: 1, ..Default::default() });
    // Another process has not read the object. It only queries whether the object exists, and so
    // does not write it again.
    assert_eq!(put(&remote.tier("a"), &SCOPE).pages_written, 0);
    // A query whether the object exists does not clear the rejection.
    with_prompt(&SCOPE, |p, until| assert_eq!(tier.probe(p, until).unwrap(), 0));
    with_prompt(&SCOPE, |p, until| assert_eq!(tier.missing(p, 0, until).unwrap(), 0..128));
    assert_eq!(put(&tier, &SCOPE).pages_written, 128);
    assert_eq!(remote.value(&name), good);
    assert_eq!(get(&tier, &SCOPE, 0..PAGES), PAGES);
    assert_eq!(get(&remote.tier("a"), &SCOPE, 0..PAGES), PAGES);
}

#[test]
fn pages_are_read_by_range_with_a_key() {
    for zstd in [None, Some(1)] {
        let remote = TestRemote { zstd, ..TestRemote::new() };
        put(&remote.tier("a"), &SCOPE);
        for range in [0..PAGES, 0..1, 5..6, 100..140, 128..144, PAGES - 1..PAGES] {
            let tier = remote.tier("a");
            assert_eq!(get(&tier, &SCOPE, range.clone()), range.len(), "{range:?}, {zstd:?}");
            assert_eq!(tier.stats().rejected, RejectedObjects::default());
        }
    }
}

/// Stores `value` under the name of an object, and reads the prompt. Returns the rejections that
/// the tier counts.
fn rejected(remote: &TestRemote, scope: &ScopeId, name: &str, value: &[u8]) -> RejectedObjects {
    let before = remote.value(name);
    remote.backend.set(name, value).unwrap();
    let tier = remote.tier("a");
    get(&tier, scope, 0..PAGES);
    remote.backend.set(name, &before).unwrap();
    tier.stats().rejected
}

const WRONG_TAG: RejectedObjects =
    RejectedObjects { damaged: 0, unsealed: 0, unknown_key: 0, wrong_tag: 1 };

#[test]
fn swapped_pages_are_rejected() {
    for zstd in [None, Some(1)] {
        let remote = TestRemote { zstd, ..TestRemote::new() };
        put(&remote.tier("a"), &SCOPE);
        put(&remote.tier("a"), &OTHER);
        let name = remote.name(&SCOPE, 16);
        let good = remote.value(&name);

        // Swap two pages of one object, with their lengths.
        let mut parsed = ParsedObject::new(good.clone());
        let (two, three) = (parsed.stored_range(2), parsed.stored_range(3));
        let swapped = [&good[three.clone()], &good[two.clone()]].concat();
        parsed.object[two.start..three.end].copy_from_slice(&swapped);
        parsed.header.slices.swap(2, 3);
        assert_eq!(rejected(&remote, &SCOPE, &name, &parsed.assemble()), WRONG_TAG);

        // Swap two pages with their lengths, tags and keys.
        let mut parsed = ParsedObject::new(good.clone());
        parsed.object[two.start..three.end].copy_from_slice(&swapped);
        parsed.header.slices.swap(2, 3);
        let mut keys: Vec<Vec<u8>> = parsed.header.keys.iter().map(<[u8]>::to_vec).collect();
        keys.swap(2, 3);
        parsed.header.keys = keys.iter().collect();
        let (encoded, _) = parsed.header.encode().unwrap();
        let tags = parsed.at + encoded.len();
        let mut object = parsed.assemble();
        let (before, after) = object.split_at_mut(tags + 3 * 32);
        before[tags + 2 * 32..].swap_with_slice(&mut after[..32]);
        assert_eq!(rejected(&remote, &SCOPE, &name, &object), WRONG_TAG);

        // Under the same name, store the object of 128 pages, then an object of another scope:
        // unchanged, and with this scope in its header.
        let longer = remote.value(&remote.name(&SCOPE, 128));
        assert_eq!(rejected(&remote, &SCOPE, &name, &longer).damaged, 1);
        let other = remote.value(&remote.name(&OTHER, 16));
        assert_eq!(rejected(&remote, &SCOPE, &name, &other), WRONG_TAG);
        let mut parsed = ParsedObject::new(other.clone());
        parsed.header.scope = SCOPE;
        assert_eq!(rejected(&remote, &SCOPE, &name, &parsed.assemble()), WRONG_TAG);

        // Put a page of another scope after the valid header.
        let (theirs, mut parsed) = (ParsedObject::new(other), ParsedObject::new(good.clone()));
        if theirs.stored_range(4).len() == parsed.stored_range(4).len() {
            parsed.replace(4, &theirs.object[theirs.stored_range(4)]);
            assert_eq!(rejected(&remote, &SCOPE, &name, &parsed.object), WRONG_TAG);
        }

        // Change the codec of a page, which the page's tag covers.
        let mut parsed = ParsedObject::new(good);
        parsed.header.slices[0].codec ^= 128;
        let rejections = rejected(&remote, &SCOPE, &name, &parsed.assemble());
        assert_eq!(rejections, WRONG_TAG);
    }
}

#[test]
fn flipped_byte_of_sealed_object_is_rejected() {
    let remote = TestRemote { zstd: Some(1), ..TestRemote::new() };
    put(&remote.tier("a"), &SCOPE);
    let name = remote.name(&SCOPE, 4);
    let good = remote.value(&name);
    let header = ParsedObject::new(good.clone());
    for at in (0..header.at + 600).chain((header.begin..good.len()).step_by(5)) {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        remote.backend.set(&name, &bad).unwrap();
        let tier = remote.tier("a");
        // `get` checks every byte that it reads. A flipped bit in the padding between header and
        // pages has no effect.
        let read = get(&tier, &SCOPE, 144..148);
        let seal = header.at + header.header.encode().unwrap().0.len() + 4 * 32;
        assert!(read < 4 || (seal..header.begin).contains(&at), "byte {at}");
    }
    for length in [0, 1, 60, 4096, good.len() - 1] {
        remote.backend.set(&name, &good[..length]).unwrap();
        assert!(get(&remote.tier("a"), &SCOPE, 144..148) < 4, "{length} bytes");
    }
}

#[test]
fn unsealed_object_under_sealed_name_is_rejected() {
    let remote = TestRemote::new();
    put(&remote.tier(""), &SCOPE);
    let plain = remote.names();
    assert_eq!(
        get(&remote.tier("a"), &SCOPE, 0..PAGES),
        0,
        "a reader with a key must find no plain object"
    );
    assert_eq!(put(&remote.tier("a"), &SCOPE).pages_written, PAGES as u64);
    assert_eq!(
        get(&remote.tier(""), &SCOPE, 0..PAGES),
        PAGES,
        "the plain objects must stay beside the sealed objects"
    );
    for name in &plain {
        let planted = name.replace("ritornello/3/", "ritornello/4/");
        remote.backend.set(&planted, &remote.value(name)).unwrap();
    }
    let tier = remote.tier("a");
    assert_eq!(get(&tier, &SCOPE, 0..PAGES), 0);
    assert_eq!(tier.stats().rejected, RejectedObjects { unsealed: 1, ..Default::default() });
}

#[test]
fn rotation_reads_older_keys_until_they_are_removed() {
    let remote = TestRemote::new();
    put(&remote.tier("a"), &SCOPE);
    // Rotate the key: add the new key to the file of every process, make it the first key of each
    // file, then remove the old key.
    assert_eq!(get(&remote.tier("ab"), &SCOPE, 0..PAGES), PAGES);
    put(&remote.tier("ba"), &OTHER);
    for ids in ["ab", "ba"] {
        assert_eq!(get(&remote.tier(ids), &SCOPE, 0..PAGES), PAGES);
        assert_eq!(get(&remote.tier(ids), &OTHER, 0..PAGES), PAGES);
    }
    let last = remote.tier("b");
    assert_eq!(get(&last, &OTHER, 0..PAGES), PAGES);
    assert_eq!(get(&last, &SCOPE, 0..PAGES), 0);
    assert_eq!(last.stats().rejected, RejectedObjects { unknown_key: 1, ..Default::default() });
    assert_eq!(
        put(&last, &SCOPE).pages_written,
        128,
        "only the rejected object must be written again"
    );
    assert_eq!(get(&remote.tier("b"), &SCOPE, 0..128), 128);
}

#[test]
fn remote_is_unused_until_key_file_is_usable() {
    let remote = TestRemote::new();
    put(&remote.tier("a"), &SCOPE);
    let before = remote.names();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key");
    let keys = Arc::new(KeyRing::deferred(&path));
    let tier = || {
        let options = RemoteOptions { zstd: None, keys: Some(Arc::clone(&keys)) };
        RemoteTier::with_options(Arc::clone(&remote.backend) as Arc<dyn Backend>, options)
    };
    let (unusable, blank) = (tier(), vec![0; PAGE]);
    with_prompt(&SCOPE, |p, until| assert!(unusable.probe(p, until).is_err()));
    with_prompt(&OTHER, |p, until| {
        assert!(unusable.put(p, 0..PAGES, |_| &blank[..], until).is_err());
    });
    assert_eq!(get(&unusable, &SCOPE, 0..PAGES), 0);
    let stats = unusable.stats();
    assert!(stats.calls.open && stats.calls.failures > 0, "{stats:?}");
    assert_eq!(stats.rejected, RejectedObjects::default());
    assert_eq!(remote.names(), before);
    std::fs::write(&path, format!("a {}\n", "61".repeat(32))).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    // The failures paused the calls of `unusable` for a minute; a new tier is not paused.
    assert_eq!(get(&tier(), &SCOPE, 0..PAGES), PAGES);
    assert_eq!(put(&tier(), &OTHER).pages_written, PAGES as u64);
    let inventory = Inventory::take(remote.backend.as_ref()).unwrap();
    assert!(inventory.objects.iter().all(|object| object.form == Form::Sealed));
}

#[test]
fn fsck_keeps_objects_of_unknown_keys() {
    let remote = TestRemote::new();
    put(&remote.tier("a"), &SCOPE);
    put(&remote.tier("b"), &OTHER);
    put(&remote.tier(""), &OTHER);
    let name = remote.name(&SCOPE, 128);
    forge(&remote, &name);
    let inventory = Inventory::take(remote.backend.as_ref()).unwrap();
    assert_eq!(Form::ALL.map(|form| inventory.objects_of(form)), [5, 10]);
    let check = |ids: &str, repair| {
        let keys = (!ids.is_empty()).then(|| ring(ids));
        fsck(remote.backend.as_ref(), &inventory, keys.as_deref(), repair, &mut |_| {}).unwrap()
    };
    let blind = check("", false);
    assert_eq!((blind.damaged.len(), blind.unauthenticated), (0, 15), "all checksums must match");
    let found = check("a", true);
    assert_eq!((found.objects, found.unauthenticated, found.removed), (15, 5, 1));
    assert_eq!((&found.damaged[0].0, found.unknown_key.len()), (&name, 5));
    assert!(found.damaged[0].1.contains("forged"), "{:?}", found.damaged);
    assert!(found.unknown_key[0].1.contains("`b`"), "{:?}", found.unknown_key);
    assert_eq!(check("ab", false).gone, 1);
}

#[test]
fn gc_keeps_objects_that_sealed_objects_continue() {
    let remote = TestRemote::new();
    put(&remote.tier("a"), &SCOPE);
    let all = Inventory::take(remote.backend.as_ref()).unwrap().bytes();
    let options = CollectOptions {
        max_age: None,
        budget: Some(all - 1),
        grace: Duration::ZERO,
        dry_run: false,
    };
    let collected = collect(remote.backend.as_ref(), &options, None, &mut |_| {}).unwrap();
    assert_eq!((collected.objects, collected.removed_objects, collected.orphans), (5, 1, 0));
    assert_eq!(
        get(&remote.tier("a"), &SCOPE, 0..PAGES),
        PAGES - 1,
        "only the last object must be removed"
    );
}

#[test]
fn forged_page_does_not_enter_local_tiers() {
    use common::{find, host, keys, put, reads, tier};
    let (prompt, backend) = (keys(1, 0, 40), Arc::new(MemoryBackend::default()));
    let over = |dir: &tempfile::TempDir| {
        let options = RemoteOptions { zstd: None, keys: Some(ring("a")) };
        Cache::open(
            &TierSpec::list(&[&host(dir, 64), "memory:"]).unwrap(),
            &Settings::default(),
            |_| {
                let backend = Arc::clone(&backend) as Arc<dyn Backend>;
                Ok(RemoteTier::with_options(backend, options.clone()))
            },
        )
        .unwrap()
    };
    let [first, second] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let cache = over(&first);
    put(&cache, &prompt, 0);
    cache.flush().unwrap();
    let inventory = Inventory::take(backend.as_ref()).unwrap();
    assert!(inventory.objects.iter().all(|object| object.form == Form::Sealed));
    for object in &inventory.objects {
        let mut parsed = ParsedObject::new(backend.get(&object.name, None).unwrap().unwrap());
        parsed.replace(0, &[66; common::PAGE]);
        backend.set(&object.name, &parsed.assemble()).unwrap();
    }
    let cache = over(&second);
    assert_eq!(find(&cache, &prompt).local, 0);
    let calls = tier(&cache, "remote").remote.unwrap();
    assert!(calls.wrong_tag > 0, "{calls:?}");
    // This process has read and rejected the objects, so it writes them again.
    put(&cache, &prompt, 0);
    cache.flush().unwrap();
    let third = tempfile::tempdir().unwrap();
    let cache = over(&third);
    let found = find(&cache, &prompt);
    assert!(found.local > 0 && reads(&cache, &prompt[..found.local], 0), "{found:?}");
}
