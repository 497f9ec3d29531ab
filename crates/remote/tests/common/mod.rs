//! Servers, a proxy that injects faults, and prompts to transfer.

pub mod proxy;
pub mod server;

use ritornello_format::ScopeId;
use ritornello_tiers::remote::{Prompt, RemoteTier};
use std::ops::Range;
use std::time::{Duration, Instant};

pub const SCOPE: ScopeId = ScopeId([3; 16]);
pub const PAGE: usize = 128 << 10;

pub fn long_deadline() -> Instant {
    Instant::now() + Duration::from_secs(120)
}

/// The keys of prompt `number`, which no other prompt has.
pub fn keys(number: u8, pages: usize) -> Vec<Vec<u8>> {
    (0..pages).map(|at| [vec![number; 28], (at as u32).to_le_bytes().to_vec()].concat()).collect()
}

pub fn page(key: &[u8]) -> Vec<u8> {
    let seed =
        key.iter().fold(7_u64, |seed, byte| seed.wrapping_mul(31).wrapping_add(u64::from(*byte)));
    let word = |at: u64| (at ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
    (0..PAGE as u64 / 8).map(word).collect::<Vec<_>>().into_flattened()
}

/// Writes a prompt. Returns the number of its pages that are present afterwards.
pub fn put(tier: &RemoteTier, keys: &[Vec<u8>], deadline: Instant) -> usize {
    let refs: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    let pages: Vec<Vec<u8>> = keys.iter().map(|key| page(key)).collect();
    let prompt = Prompt { scope: &SCOPE, page_bytes: PAGE as u64, chained: true, keys: &refs };
    tier.put(&prompt, 0..keys.len(), |at| &pages[at], deadline).unwrap()
}

/// Reads pages `range` of a prompt. Checks the bytes of the pages that were read, and returns their
/// number.
pub fn get(tier: &RemoteTier, keys: &[Vec<u8>], range: Range<usize>, deadline: Instant) -> usize {
    let refs: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    let prompt = Prompt { scope: &SCOPE, page_bytes: PAGE as u64, chained: true, keys: &refs };
    let mut out = vec![0; range.len() * PAGE];
    let read = tier.get(&prompt, range.clone(), &mut out, deadline).unwrap();
    for (at, out) in range.zip(out.chunks(PAGE)).take(read) {
        assert!(page(&keys[at]) == out, "page {at} has different bytes");
    }
    read
}

/// Probes a prompt. Returns the number of pages found.
pub fn probe(
    tier: &RemoteTier,
    keys: &[Vec<u8>],
    deadline: Instant,
) -> ritornello_format::Result<usize> {
    let refs: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    tier.probe(
        &Prompt { scope: &SCOPE, page_bytes: PAGE as u64, chained: true, keys: &refs },
        deadline,
    )
}
