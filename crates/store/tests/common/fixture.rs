//! The store in `tests/fixtures`: what `examples/make_fixture.rs` puts into it, and what
//! `tests/fixtures.rs` expects to find.

use super::*;
use ritornello_codec::Codec;
use ritornello_format::{PageHash, ScopeSettings, ScopeSlot};
use ritornello_index::residency::{
    Residency, RunResidency, RunResidencyOptions, Tier, Tiers, Worker,
};
use ritornello_store::{CapacityChange, Directory, ReserveRequest};

/// Seconds since 1970 when the fixture was written, by its clock.
pub const WRITTEN: u64 = 1_800_000_000;
/// End of the retention of the scope "retained", in seconds since 1970.
pub const RETAINED_UNTIL: u64 = WRITTEN + 300 * 86_400;
/// Name of the client whose reservation was neither committed nor aborted.
pub const CLIENT: &str = "0123456789abcdef0123456789abcdef";
/// Bytes of a long page: more than two segments, and not a multiple of the unit of 4,096 bytes.
pub const LONG_PAGE: u64 = 2 * MIB + 300_001;
pub const QUOTA: u64 = 8 * MIB;
/// The scope that was dropped with its page.
pub const DROPPED: &str = "dropped";

/// Pages of one scope; `deleted` holds the indexes of the pages that were deleted after the put.
pub struct Pages {
    pub scope: Scope,
    pub keys: Vec<Vec<u8>>,
    pub deleted: Vec<usize>,
}

impl Pages {
    fn new(scope: Scope, keys: Vec<Vec<u8>>) -> Self {
        Self { scope, keys, deleted: Vec::new() }
    }
}

/// Returns the codec whose name ends the scope's model name.
pub fn codec_of(scope: &Scope) -> Option<Codec> {
    Codec::ALL.iter().copied().find(|codec| scope.model.ends_with(codec.word()))
}

pub fn is_lossy(scope: &Scope) -> bool {
    matches!(codec_of(scope), Some(Codec::Int8 | Codec::Int4))
}

/// Returns a scope whose pages are `layers` pairs of 16 x 64 matrices: 4 KiB per layer.
pub fn numbers(name: &str, dtype: &str, layers: u32) -> Scope {
    Scope {
        weights: vec![7; 32],
        adapter: "an adapter".to_owned(),
        dtype: dtype.to_owned(),
        kv_scale: "none".to_owned(),
        page_tokens: 16,
        layers: (0, layers),
        kv_heads: (0, 1),
        head_dim: 64,
        hash_algorithm: "sha256_cbor".to_owned(),
        salt: b"salt".to_vec(),
        epoch: b"epoch".to_vec(),
        part: 1,
        extra: [("isa".to_owned(), "amx".to_owned())].into(),
        layout: "page_first".to_owned(),
        page_bytes: None,
        ..Scope::opaque(name, 1, true)
    }
}

/// The bytes that were put for `key`. The bytes of long pages repeat, so that the fixture is small.
pub fn content(scope: &Scope, key: &[u8]) -> Vec<u8> {
    let mut bytes = page(scope, key);
    if bytes.len() > 20_000 {
        let pattern = bytes[..256].to_vec();
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = pattern[at % 256] ^ if at % 2 == 0 { (at >> 16) as u8 } else { 0 };
        }
    }
    // Every fourth page of numbers is noise, which no lossless codec shortens.
    if !scope.dtype.is_empty() && key[8] % 4 != 3 {
        for number in bytes.chunks_exact_mut(2) {
            let exponent = 120 + (number[1] & 7);
            number[1] = (number[1] & 0x80) | (exponent >> 1);
            number[0] = (number[0] & 0x7f) | (exponent << 7);
        }
    }
    bytes
}

/// Returns the sequences of the scopes that the fixture keeps, in the order of their puts.
pub fn contents() -> Vec<Pages> {
    let long_key = (0..64).collect::<Vec<u8>>();
    let mut all = vec![
        Pages::new(chained(9_000), sequence(1, 5)),
        // The last page was deleted, which shortens the run.
        Pages { deleted: vec![3], ..Pages::new(chained(9_000), sequence(2, 4)) },
        // Pages 2 and 3 were put before pages 0 and 1.
        Pages::new(chained(9_000), sequence(3, 4)),
        // A page was removed from the middle of its run.
        Pages { deleted: vec![1], ..Pages::new(unchained(4096), sequence(4, 4)) },
        Pages::new(unchained(4096), vec![vec![9; 8], long_key, vec![8; 33]]),
        Pages::new(Scope::opaque("long", LONG_PAGE, true), sequence(5, 2)),
        Pages::new(Scope::opaque("retained", 5000, true), sequence(6, 2)),
        Pages::new(numbers("small split", "bfloat16", 4), sequence(7, 4)),
        Pages::new(numbers("float16 split", "float16", 4), sequence(8, 2)),
    ];
    for codec in Codec::ALL {
        all.push(Pages::new(numbers(codec.word(), "bfloat16", 80), sequence(9, 2)));
    }
    // Sequence 10 is put after the checkpoint, so only the journal has its record.
    all.push(Pages::new(chained(9_000), sequence(10, 3)));
    all
}

pub fn fixture_options(dir: &Path) -> Options {
    Options {
        index: None,
        paths: vec![dir.join("a"), dir.join("b")],
        wall_clock: || WRITTEN,
        ..options(dir, 24)
    }
}

pub fn put_content(
    store: &Store,
    scope: &Scope,
    keys: &[Vec<u8>],
    options: &PutOptions,
) -> Outcome {
    let pages: Vec<Vec<u8>> = keys.iter().map(|key| content(scope, key)).collect();
    let pages: Vec<&[u8]> = pages.iter().map(Vec::as_slice).collect();
    let source = BorrowedPages::new(&pages);
    store.put_batch(scope, &refs(keys), &source, options, &Control::default()).unwrap()
}

/// Gets pages. Returns, for each page, whether it was read, and its bytes.
pub fn get_content(store: &Store, scope: &Scope, keys: &[Vec<u8>]) -> (Vec<bool>, Vec<Vec<u8>>) {
    let bytes = scope.resolved_page_bytes().unwrap() as usize;
    let mut pages = vec![vec![0xEE; bytes]; keys.len()];
    let mut slices: Vec<&mut [u8]> = pages.iter_mut().map(Vec::as_mut_slice).collect();
    let target = BorrowedPagesMut::new(&mut slices);
    let outcome = store.get_batch(scope, &refs(keys), &target, &Control::default()).unwrap();
    drop(target);
    (outcome.ok, pages)
}

/// Makes the fixture in `dir`: a store, and beside it a residency, which records the workers and
/// tiers on which pages are present.
pub fn make(dir: &Path) {
    let home = dir.join("store");
    make_store(&home);
    make_residency(&dir.join("residency"));
}

fn make_store(home: &Path) {
    let open = open_on(Arc::new(Host), &fixture_options(home)).unwrap();
    let all = contents();
    let (last, first) = all.split_last().unwrap();
    for (at, pages) in first.iter().enumerate() {
        let Pages { scope, keys, deleted } = pages;
        if let Some(codec) = codec_of(scope) {
            let codec = Some(codec.number());
            open.store.configure(scope, &ScopeSettings { codec, ..Default::default() }).unwrap();
        }
        let retain_until = if scope.model == "retained" { RETAINED_UNTIL } else { 0 };
        // Put the first sequence in two parts, and the third in two parts in reverse order.
        let all = 0..keys.len();
        let parts = match at {
            0 => vec![0..3, 3..5],
            2 => vec![2..4, 0..2],
            _ => vec![all],
        };
        for part in parts {
            let parent = part.start.checked_sub(1).map(|before| keys[before].as_slice().into());
            let put = put_content(
                &open.store,
                scope,
                &keys[part.clone()],
                &PutOptions { parent, retain_until },
            );
            assert_eq!((put.pages, put.reason), (part.len(), ""), "{}", scope.model);
        }
        open.store.flush().unwrap();
        for page in deleted {
            open.store.delete(scope, &refs(&keys[*page..=*page])).unwrap();
        }
    }
    let settings =
        ScopeSettings { codec: None, quota_bytes: Some(QUOTA), retained_bytes: Some(QUOTA / 2) };
    open.store.configure(&first[6].scope, &settings).unwrap();
    let dropped = Scope::opaque(DROPPED, 4096, true);
    put(&open.store, &dropped, &sequence(11, 1), None);
    open.store.drop_scope(&dropped).unwrap();
    // Drain the first directory, so that its runs are moved.
    let text = |name: &str| home.join(name).to_str().unwrap().to_owned();
    open.store.change_capacity(&CapacityChange::AddVolume(text("c"))).unwrap();
    open.store.change_capacity(&CapacityChange::DrainVolume(text("a"))).unwrap();
    open.store.touch(&first[0].scope, &refs(&first[0].keys)).unwrap();
    open.store.flush().unwrap();
    // End the owner without a close, so that the next owner begins with a checkpoint.
    assert!(open.forget());
    let again = Options { paths: Vec::new(), ..fixture_options(home) };
    let open = open_on(Arc::new(Host), &again).unwrap();
    put_content(&open.store, &last.scope, &last.keys, &PutOptions::default());
    open.store.flush().unwrap();
    let client = open.core.catalog_for(ClientId(7), CLIENT);
    let scope = client.resolve(&first[3].scope, false).unwrap().unwrap();
    let request = ReserveRequest { timeout: Duration::from_secs(5), ..Default::default() };
    assert_eq!(
        client.reserve(scope, &refs(&sequence(12, 3)), None, &request).unwrap().runs.len(),
        1
    );
    let lossy = all.iter().filter(|pages| is_lossy(&pages.scope)).map(|pages| {
        let (ok, bytes) = get_content(&open.store, &pages.scope, &pages.keys);
        assert!(ok.iter().all(|ok| *ok));
        let sums: Vec<String> = bytes
            .iter()
            .map(|page| format!("{:016x}", ritornello_format::checksum(page)))
            .collect();
        format!("{} {}\n", pages.scope.model, sums.join(" "))
    });
    std::fs::write(home.with_file_name("lossy"), lossy.collect::<String>()).unwrap();
    open.close();
    // Make the directories in the manifest relative, so that the fixture opens in any directory.
    let directory = Directory::new(Arc::new(Host), home);
    let mut manifest = directory.manifest().unwrap().unwrap();
    for volume in manifest.volumes.iter_mut().filter(|volume| !volume.is_retired()) {
        let name = Path::new(&volume.dir).strip_prefix(home).unwrap();
        volume.dir = name.to_str().unwrap().to_owned();
    }
    directory.write_manifest(&manifest).unwrap();
}

/// Returns the first `count` pages of the residency's only chain.
pub fn hashes(count: u8) -> Vec<PageHash> {
    (1..=count).map(|n| PageHash([n; 16])).collect()
}

pub fn open_residency(dir: &Path) -> RunResidency {
    RunResidency::open(Arc::new(Host), dir, RunResidencyOptions::default()).unwrap()
}

fn make_residency(dir: &Path) {
    let residency = open_residency(dir);
    let (scope, pages) = (ScopeSlot(1), hashes(6));
    residency.put(scope, Worker(1), Tier::Device, None, &pages).unwrap();
    residency.put(scope, Worker(2), Tier::Disk, None, &pages[..3]).unwrap();
    residency.put(scope, Worker(2), Tier::Remote, Some(pages[2]), &pages[3..]).unwrap();
    residency.put(scope, Worker(3), Tier::Host, None, &pages).unwrap();
    residency.put(ScopeSlot(2), Worker(1), Tier::Host, None, &pages).unwrap();
    residency.sync().unwrap();
    residency.remove_blocks(scope, Worker(1), Tiers::ALL, &pages[4..]);
    residency.clear_worker(Worker(3));
    residency.clear_scope(ScopeSlot(2));
    residency.sync().unwrap();
}
