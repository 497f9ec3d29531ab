//! Pages of the clients of `soak --faults`: keys and bytes follow from the client's number, the
//! sequence's number, and the page's position in the sequence.

use super::super::work::fill;
use ritornello_format::Scope;

/// Pages per sequence.
pub const PAGES: usize = 4;
/// Bytes per page.
pub const PAGE_BYTES: usize = 64 << 10;

/// Returns the scope of the sequences of all clients.
pub fn scope() -> Scope {
    Scope::opaque("soak under faults", PAGE_BYTES as u64, true)
}

/// Bytes per page of [`salted`].
pub const SALTED_BYTES: usize = 4 << 10;

/// Returns a scope such as an engine derives from the salt of a request.
pub fn salted(salt: u64) -> Scope {
    Scope {
        salt: salt.to_le_bytes().to_vec(),
        ..Scope::opaque("soak salts", SALTED_BYTES as u64, true)
    }
}

/// One sequence.
#[derive(Clone, Debug)]
pub struct Sequence {
    keys: [[u8; 24]; PAGES],
}

impl Sequence {
    /// Returns sequence `number` of a client.
    pub fn new(client: u64, number: u64) -> Self {
        let key = |page: usize| {
            let mut key = [0; 24];
            for (to, word) in key.chunks_exact_mut(8).zip([client, number, page as u64]) {
                to.copy_from_slice(&word.to_le_bytes());
            }
            key
        };
        Self { keys: std::array::from_fn(key) }
    }

    /// Returns the keys in order.
    pub fn keys(&self) -> [&[u8]; PAGES] {
        self.keys.each_ref().map(<[u8; 24]>::as_slice)
    }

    /// Fills the pages with the bytes that their keys imply.
    pub fn fill(&self, pages: &mut [Vec<u8>]) {
        for (page, key) in pages.iter_mut().zip(&self.keys) {
            fill(page, PAGE_BYTES, key, false);
        }
    }
}
