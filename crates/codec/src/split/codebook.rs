//! The codebook of a block of numbers: the 15 exponents that have a 4-bit code.

/// Number of exponents that have a code.
pub const CODES: usize = 15;
/// Marks an escape among the codes: a number with an exponent that the codebook lacks. The
/// exponents of escapes are listed after the codes.
pub const ESCAPE: u8 = 15;
/// The sample from which a block's codebook is chosen has one cache line in 32, but at least 8 and
/// at most 32 lines. The interval between sampled lines is rounded up, which can reduce the sample.
/// A block of at most 8 lines is sampled in full.
const SAMPLE: (usize, usize, usize) = (32, 8, 32);
/// Numbers per cache line.
const LINE: usize = 32;

/// A codebook, and two tables that find the code of an exponent with 16-byte shuffles. The tables
/// are indexed by the low four bits of an exponent. At most two exponents with equal low bits have
/// a code: one in each table.
#[derive(Clone, Copy, Debug)]
pub struct Codebook {
    /// The exponent of each code; the last entry is unused.
    pub exponents: [u8; 16],
    /// The most frequent exponent with each value of the low four bits, and its code.
    pub first: Lookup,
    /// The second most frequent exponent with each value of the low four bits, and its code.
    pub second: Lookup,
}

/// Exponents and codes, indexed by the low four bits of an exponent.
#[derive(Clone, Copy, Debug)]
pub struct Lookup {
    /// At index `i`: the exponent with the low four bits `i` whose code is in `codes`. If no such
    /// exponent has a code, an exponent with different low bits, which no lookup matches.
    pub exponents: [u8; 16],
    /// The code of the exponent at the same index.
    pub codes: [u8; 16],
}

impl Lookup {
    fn empty() -> Self {
        Self { exponents: std::array::from_fn(|low| !(low as u8)), codes: [ESCAPE; 16] }
    }

    fn set(&mut self, exponent: u8, code: u8) {
        self.exponents[usize::from(exponent & 15)] = exponent;
        self.codes[usize::from(exponent & 15)] = code;
    }

    fn code(&self, exponent: u8) -> Option<u8> {
        let low = usize::from(exponent & 15);
        (self.exponents[low] == exponent).then(|| self.codes[low])
    }
}

impl Codebook {
    /// Chooses the codebook of a block of bfloat16 numbers from a sample of them. `None` if the
    /// codebook has codes for at most half of the sample.
    pub fn choose(block: &[u8]) -> Option<Self> {
        let counts = count(block);
        let sampled: u32 = counts.iter().sum();
        let least = counts.iter().position(|&seen| seen > 0).unwrap_or(0);
        // The upper 16 bits of a rank are the exponent's count in the sample, which has far fewer
        // than 2^16 numbers. Exponents with equal counts rank in descending order; but among
        // exponents with count zero, the exponents between 0 and the smallest sampled exponent rank
        // first.
        let rank = |exponent: usize| {
            let below = if exponent < least { exponent as u32 } else { 0 };
            counts[exponent] << 16 | below << 8 | exponent as u32
        };
        // The two most frequent exponents with each value of the low four bits.
        let mut candidates = [0u32; 32];
        let (best, next) = candidates.split_at_mut(16);
        for high in 0..16 {
            for (low, (best, next)) in best.iter_mut().zip(&mut *next).enumerate() {
                let candidate = rank(high << 4 | low);
                *next = (*next).max(candidate.min(*best));
                *best = (*best).max(candidate);
            }
        }
        candidates.sort_unstable_by(|a, b| b.cmp(a));
        let mut book = Self { exponents: [0; 16], first: Lookup::empty(), second: Lookup::empty() };
        let mut covered = 0;
        for (code, &candidate) in candidates[..CODES].iter().enumerate() {
            let exponent = candidate as u8;
            covered += candidate >> 16;
            book.exponents[code] = exponent;
            let taken = book.first.codes[usize::from(exponent & 15)] != ESCAPE;
            let lookup = if taken { &mut book.second } else { &mut book.first };
            lookup.set(exponent, code as u8);
        }
        (covered * 2 > sampled).then_some(book)
    }

    /// The code of an exponent; [`ESCAPE`] if the codebook lacks the exponent.
    pub fn code(&self, exponent: u8) -> u8 {
        self.first.code(exponent).or_else(|| self.second.code(exponent)).unwrap_or(ESCAPE)
    }
}

/// Counts the exponents of a sample spread over the block.
fn count(block: &[u8]) -> [u32; 256] {
    let lines = block.len().div_ceil(2 * LINE);
    let (one_in, least, most) = SAMPLE;
    let step = lines.div_ceil((lines / one_in).clamp(least, most)).max(1);
    let sample = || block.chunks(2 * LINE).step_by(step);
    // Touch both ends of every line first, so that the loads overlap. Counting alone would wait for
    // memory line by line.
    let touched = sample().fold(0, |all, line| all ^ line[0] ^ line[line.len() - 1]);
    std::hint::black_box(touched);
    // Use two tables, so that neighbours with the same exponent do not wait for each other's
    // increment.
    let mut counts = [[0u32; 256]; 2];
    for line in sample() {
        for pair in line.chunks_exact(4) {
            counts[0][usize::from(exponent([pair[0], pair[1]]))] += 1;
            counts[1][usize::from(exponent([pair[2], pair[3]]))] += 1;
        }
        if let [.., low, high] = line
            && line.len() % 4 == 2
        {
            counts[0][usize::from(exponent([*low, *high]))] += 1;
        }
    }
    std::array::from_fn(|at| counts[0][at] + counts[1][at])
}

/// The exponent of a bfloat16.
pub fn exponent(number: [u8; 2]) -> u8 {
    number[1] << 1 | number[0] >> 7
}
