//! Makes inputs that are nearly valid.

/// Maximum length of an input in bytes.
const BYTES_MAX: usize = 1 << 16;
/// Boundary values of lengths and counters.
const NUMBERS: [u64; 10] =
    [0, 1, 2, 0x7f, 0xff, 0x7fff, 0xffff, 0x7fff_ffff, 0xffff_ffff, u64::MAX];

pub struct Mutator<'a> {
    dice: u64,
    seeds: &'a [Vec<u8>],
}

impl<'a> Mutator<'a> {
    pub fn new(seed: u64, seeds: &'a [Vec<u8>]) -> Self {
        Self { dice: seed ^ 0x9e37_79b9_7f4a_7c15, seeds }
    }

    /// Returns a random number below `bound` (SplitMix64).
    fn roll(&mut self, bound: usize) -> usize {
        self.dice = self.dice.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.dice;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % bound.max(1) as u64) as usize
    }

    pub fn next(&mut self) -> Vec<u8> {
        let mut input = self.seeds[self.roll(self.seeds.len())].clone();
        for _ in 0..=self.roll(5) {
            self.change(&mut input);
        }
        input.truncate(BYTES_MAX);
        input
    }

    fn change(&mut self, input: &mut Vec<u8>) {
        let at = self.roll(input.len());
        match self.roll(8) {
            0 | 1 if !input.is_empty() => input[at] ^= 1 << self.roll(8),
            2 if !input.is_empty() => input[at] = self.roll(256) as u8,
            3 => {
                let width = [1, 2, 4, 8][self.roll(4)];
                let number = NUMBERS[self.roll(NUMBERS.len())].to_le_bytes();
                let end = (at + width).min(input.len());
                input[at..end].copy_from_slice(&number[..end - at]);
            }
            4 => input.truncate(at),
            5 => {
                let end = (at + 1 + self.roll(32)).min(input.len());
                input.drain(at..end);
            }
            6 => {
                let other = &self.seeds[self.roll(self.seeds.len())];
                let from = self.roll(other.len());
                let upto = (from + 1 + self.roll(64)).min(other.len());
                input.splice(at..at, other[from..upto].iter().copied());
            }
            _ => {
                let more = self.roll(64);
                let byte = self.roll(256) as u8;
                input.extend(std::iter::repeat_n(byte, more));
            }
        }
    }
}
