//! Page contents, computed from a seed and the page's name, and keys, computed from the name. Every
//! block is distinct, so that every byte read can be checked.

use crate::random::mix;

/// Bytes of a block, the unit of contents.
const BLOCK: usize = 4096;
/// Length of the random bytes from which blocks are cut.
const PATTERN: usize = 1 << 20;
/// Bytes at the start of a block that identify it.
const STAMP: usize = 16;
/// Length of a key: the length of SHA-256 block hashes.
pub const KEY_BYTES: usize = 32;

/// Identifies a page. Sequences of different sets have different keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageName {
    /// Number of the set of sequences.
    pub set: u32,
    /// Number of the sequence in the set.
    pub sequence: u32,
    /// Position of the page in the sequence.
    pub page: u32,
}

impl PageName {
    fn number(self) -> u64 {
        mix(mix(u64::from(self.set) << 32 | u64::from(self.sequence)) ^ u64::from(self.page))
    }

    /// Returns the key of the page.
    #[must_use]
    pub fn key(self) -> [u8; KEY_BYTES] {
        let number = self.number();
        let mut key = [0; KEY_BYTES];
        for (at, word) in key.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&mix(number ^ at as u64).to_le_bytes());
        }
        key
    }
}

/// The keys of one sequence.
#[derive(Clone, Debug)]
pub struct Keys(Vec<[u8; KEY_BYTES]>);

impl Keys {
    /// Returns the keys of the first `pages` pages.
    #[must_use]
    pub fn of(set: u32, sequence: u32, pages: u32) -> Self {
        Self((0..pages).map(|page| PageName { set, sequence, page }.key()).collect())
    }

    /// Returns the keys in the form the store takes.
    #[must_use]
    pub fn slices(&self) -> Vec<&[u8]> {
        self.0.iter().map(<[u8; KEY_BYTES]>::as_slice).collect()
    }
}

/// Returns the number, below `sequences`, of the sequence that probe `at` asks for: a hash of `at`,
/// so that the probes visit the sequences in scattered order.
#[must_use]
pub fn scattered(at: usize, sequences: u32) -> u32 {
    let mixed = (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    (mixed % u64::from(sequences.max(1))) as u32
}

/// Makes and checks page contents.
#[derive(Debug)]
pub struct Content {
    pattern: Vec<u8>,
}

impl Content {
    /// Returns random contents, equal for equal seeds.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let words = (0..PATTERN / 8).map(|at| mix(seed ^ mix(at as u64)).to_le_bytes());
        Self { pattern: words.flatten().collect() }
    }

    /// Returns normally distributed bfloat16 numbers, equal for equal seeds.
    #[must_use]
    pub fn numbers(seed: u64) -> Self {
        let unit = |bits: u64| (bits >> 11) as f64 / (1u64 << 53) as f64;
        let number = |at: u64| {
            // The method is Box and Muller's (1958). The argument of the logarithm is above zero.
            let (a, b) = (mix(seed ^ mix(2 * at)), mix(seed ^ mix(2 * at + 1)));
            let radius = (-2.0 * (1.0 - unit(a)).ln()).sqrt();
            let normal = (radius * (std::f64::consts::TAU * unit(b)).cos()) as f32;
            ((normal.to_bits() >> 16) as u16).to_le_bytes()
        };
        Self { pattern: (0..PATTERN as u64 / 2).flat_map(number).collect() }
    }

    fn block(&self, page: u64, at: usize) -> (&[u8], [u8; STAMP]) {
        let number = mix(page ^ at as u64);
        let from = (number % (PATTERN - BLOCK) as u64) as usize & !1;
        let mut stamp = [0; STAMP];
        stamp[..8].copy_from_slice(&page.to_le_bytes());
        stamp[8..].copy_from_slice(&number.to_le_bytes());
        (&self.pattern[from..from + BLOCK], stamp)
    }

    /// Fills a page with its contents.
    pub fn fill(&self, name: PageName, bytes: &mut [u8]) {
        let page = name.number();
        for (at, block) in bytes.chunks_mut(BLOCK).enumerate() {
            let (pattern, stamp) = self.block(page, at);
            block.copy_from_slice(&pattern[..block.len()]);
            let stamped = STAMP.min(block.len());
            block[..stamped].copy_from_slice(&stamp[..stamped]);
        }
    }

    /// Returns whether a page equals, byte for byte, the result of `fill`.
    #[must_use]
    pub fn holds(&self, name: PageName, bytes: &[u8]) -> bool {
        let page = name.number();
        bytes.chunks(BLOCK).enumerate().all(|(at, block)| {
            let (pattern, stamp) = self.block(page, at);
            let stamped = STAMP.min(block.len());
            block[..stamped] == stamp[..stamped]
                && block[stamped..] == pattern[stamped..block.len()]
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_bit_or_name_is_detected() {
        let content = Content::new(7);
        let name = PageName { set: 1, sequence: 2, page: 3 };
        let mut bytes = vec![0; 10_000];
        content.fill(name, &mut bytes);
        assert!(content.holds(name, &bytes));
        assert!(!content.holds(PageName { page: 4, ..name }, &bytes));
        assert!(!content.holds(PageName { set: 0, ..name }, &bytes));
        for at in (0..bytes.len()).step_by(97) {
            bytes[at] ^= 1;
            assert!(!content.holds(name, &bytes), "byte {at}");
            bytes[at] ^= 1;
        }
        assert_ne!(name.key(), PageName { page: 4, ..name }.key());
        assert_eq!(Keys::of(1, 2, 4).slices()[3], name.key());
    }
}
