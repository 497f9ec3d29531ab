//! The remotes in `tests/fixtures` of the repository: the pages that
//! `examples/make_remote_fixture.rs` puts into them, and that `tests/remote_fixtures.rs` expects.

use super::refs;
use ritornello_format::ScopeId;
use ritornello_tiers::remote::{
    Backend, DirectoryBackend, KeyRing, Prompt, RemoteOptions, RemoteTier,
};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const SCOPE: ScopeId = ScopeId([9; 16]);
/// Bytes per page: not a multiple of 4,096, to which the header of an object is padded.
pub const PAGE_BYTES: usize = 700;
/// A key file with the key of all sealed objects, and an older key that seals no object.
const KEYS: &str = "new 5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a\n\
                    old a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5\n";
/// Each remote: its directory, whether its pages are compressed, and whether it is sealed.
pub const REMOTES: [(&str, bool, bool); 4] = [
    ("plain", false, false),
    ("zstd", true, false),
    ("sealed", false, true),
    ("sealed-zstd", true, true),
];

/// Keys of two prompts: one of 11 pages in three objects, with keys of 8 to 64 bytes, and one of a
/// single page.
pub fn prompts() -> [Vec<Vec<u8>>; 2] {
    let key = |at: u8| vec![at + 1; [8, 32, 64][usize::from(at) % 3]];
    [(0..11).map(key).collect(), vec![vec![99; 20]]]
}

/// Returns the bytes of the page with this key: for every third key noise, which does not compress.
pub fn content(key: &[u8]) -> Vec<u8> {
    let mut state = u64::from(key[0]);
    let mut noise = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    (0..PAGE_BYTES).map(|_| if key[0].is_multiple_of(3) { noise() } else { key[0] }).collect()
}

pub fn tier(dir: &Path, is_zstd: bool, is_sealed: bool) -> RemoteTier {
    let options = RemoteOptions {
        zstd: is_zstd.then_some(3),
        keys: is_sealed.then(|| Arc::new(KeyRing::parse(KEYS).unwrap())),
    };
    let backend: Arc<dyn Backend> = Arc::new(DirectoryBackend::new(dir, "fixture"));
    RemoteTier::with_options(backend, options)
}

pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Puts the pages of `keys` that the remote does not have. Returns the number of leading pages that
/// the remote then has.
pub fn put(tier: &RemoteTier, keys: &[Vec<u8>]) -> usize {
    let (refs, pages) = (refs(keys), keys.iter().map(|key| content(key)).collect::<Vec<_>>());
    let prompt =
        Prompt { scope: &SCOPE, page_bytes: PAGE_BYTES as u64, chained: true, keys: &refs };
    tier.put(&prompt, 0..keys.len(), |at| &pages[at], soon()).unwrap()
}

/// Makes the remotes in `dir`.
pub fn make(dir: &Path) {
    for (name, is_zstd, is_sealed) in REMOTES {
        std::fs::create_dir(dir.join(name)).unwrap();
        let tier = tier(&dir.join(name), is_zstd, is_sealed);
        for keys in prompts() {
            assert_eq!(put(&tier, &keys), keys.len());
        }
    }
}
