//! Whether a move uses a kernel or the copy engines of the device.

use crate::layout::Direction;
use std::time::Duration;

/// Blocks of 1,024 threads of a kernel that moves bytes to the device. Four blocks have 256 KiB in
/// flight: more than three times the 72 KB that keep a link of 55 GB/s with a round trip of 1.3 µs
/// busy.
const SCATTER_GRID: u32 = 4;
/// Blocks of 1,024 threads of a kernel that moves bytes from the device. On an H200, two blocks
/// move as many bytes as four, because writes to host memory wait for no answer. Matrix products
/// during moves took up to 1.8 times as long as alone with four blocks, and 1.05 to 1.16 times with
/// two (docs/benchmarks/gpu.md).
const GATHER_GRID: u32 = 2;
/// Minimum length of a piece in bytes for which the copy engines count as faster than a kernel, if
/// the pool has no measurement of the move's direction. Shorter pieces are moved by the copy
/// engines only if these take at most [`SHORT_SHARE`] of the kernel's time.
const COPY_FROM: u64 = 128 << 10;
/// Maximum measured time of the copy engines, as a part of the kernel's time, at which the copy
/// engines move short pieces. The part is less than 1, because the copy engines are slower in loads
/// than in the measurement: on an H200 some loads of pieces of 32 KiB took twice as long by the
/// copy engines as by a kernel.
const SHORT_SHARE: f64 = 0.8;

/// How bytes are moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By a kernel on this number of blocks of 1,024 threads.
    Kernel {
        /// Number of blocks of threads.
        grid: u32,
    },
    /// By the copy engines, piece by piece.
    Copies,
}

impl Way {
    /// A kernel, with the number of blocks that pools use for moves in `direction`.
    #[must_use]
    pub const fn kernel(direction: Direction) -> Self {
        match direction {
            Direction::Scatter => Self::Kernel { grid: SCATTER_GRID },
            Direction::Gather => Self::Kernel { grid: GATHER_GRID },
        }
    }
}

/// The times of one move, by a kernel and by the copy engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    /// Direction of the move.
    pub direction: Direction,
    /// Number of pieces of the move.
    pub pieces: usize,
    /// Time that the move takes by a kernel.
    pub kernel: Duration,
    /// Time that the move takes by the copy engines.
    pub copies: Duration,
}

/// Chooses the way of each move of a pool.
#[derive(Clone, Debug)]
pub struct Ways {
    piece_bytes: u64,
    has_kernels: bool,
    forced: Option<Way>,
    /// The measurements, in ascending order of pieces.
    measured: Vec<Measured>,
}

impl Ways {
    /// The ways of a pool whose pieces have `piece_bytes` bytes on average.
    #[must_use]
    pub fn new(piece_bytes: u64, has_kernels: bool) -> Self {
        Self { piece_bytes, has_kernels, forced: None, measured: Vec::new() }
    }

    /// Uses `way` for all moves, in both directions, for tests and benchmarks. A device without
    /// kernels uses the copy engines nevertheless.
    #[must_use]
    pub fn force(mut self, way: Way) -> Self {
        self.forced = Some(way);
        self
    }

    /// Adds a measurement. The measurement of a move's direction with the nearest number of pieces
    /// decides the move's way: the copy engines, if their time was at most the kernel's time. With
    /// pieces shorter than 128 KiB on average the limit is 0.8 of the kernel's time.
    pub fn add(&mut self, measured: Measured) {
        let at = self.measured.partition_point(|other| other.pieces < measured.pieces);
        self.measured.insert(at, measured);
    }

    /// The measurements, in ascending order of pieces.
    #[must_use]
    pub fn measured(&self) -> &[Measured] {
        &self.measured
    }

    /// The way of a move of `pieces` pieces.
    #[must_use]
    pub fn of(&self, direction: Direction, pieces: usize) -> Way {
        let kernel = Way::kernel(direction);
        match self.forced {
            _ if !self.has_kernels => Way::Copies,
            Some(way) => way,
            None => {
                let is_long = self.piece_bytes >= COPY_FROM;
                let share = if is_long { 1.0 } else { SHORT_SHARE };
                let copies = match self.nearest(direction, pieces) {
                    Some(nearest) => nearest.copies <= nearest.kernel.mul_f64(share),
                    None => is_long,
                };
                if copies { Way::Copies } else { kernel }
            }
        }
    }

    /// The measurement in this direction whose number of pieces is nearest to `pieces` by ratio.
    fn nearest(&self, direction: Direction, pieces: usize) -> Option<&Measured> {
        let ratio = |measured: &&Measured| {
            let (a, b) = (measured.pieces.max(1) as f64, pieces.max(1) as f64);
            (a / b).ln().abs()
        };
        let measured = self.measured.iter().filter(|measured| measured.direction == direction);
        measured.min_by(|a, b| ratio(a).total_cmp(&ratio(b)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: Way = Way::kernel(Direction::Scatter);

    #[test]
    fn length_of_pieces_decides_without_measurements() {
        for (bytes, is_short) in [(8192, true), (131_071, true), (131_072, false)] {
            let ways = Ways::new(bytes, true);
            for direction in [Direction::Scatter, Direction::Gather] {
                let way = if is_short { Way::kernel(direction) } else { Way::Copies };
                assert_eq!(ways.of(direction, 1000), way);
            }
            assert_eq!(Ways::new(bytes, false).of(Direction::Scatter, 1000), Way::Copies);
        }
    }

    #[test]
    fn nearest_measurement_decides() {
        let mut ways = Ways::new(1 << 20, true);
        let micros = Duration::from_micros;
        let direction = Direction::Scatter;
        ways.add(Measured { direction, pieces: 4096, kernel: micros(90), copies: micros(50) });
        ways.add(Measured { direction, pieces: 64, kernel: micros(5), copies: micros(9) });
        assert!(ways.measured().is_sorted_by_key(|measured| measured.pieces));
        // 512 is the geometric mean of the measured 64 and 4096 pieces.
        for (pieces, way) in [(1, KERNEL), (64, KERNEL), (500, KERNEL), (530, Way::Copies)] {
            assert_eq!(ways.of(Direction::Scatter, pieces), way, "{pieces}");
        }
        assert_eq!(ways.of(Direction::Scatter, 100_000), Way::Copies);
        // Gathers were not measured: the length of pieces decides.
        assert_eq!(ways.of(Direction::Gather, 64), Way::Copies);
    }

    #[test]
    fn copy_engines_move_short_pieces_only_if_much_faster() {
        let micros = Duration::from_micros;
        for (copies, way) in [(90, KERNEL), (81, KERNEL), (80, Way::Copies), (40, Way::Copies)] {
            let mut ways = Ways::new(32_768, true);
            let (direction, copies) = (Direction::Scatter, micros(copies));
            ways.add(Measured { direction, pieces: 64, kernel: micros(100), copies });
            assert_eq!(ways.of(direction, 80), way);
        }
    }

    #[test]
    fn forced_kernel_way_without_kernels_uses_copies() {
        let kernel = Way::Kernel { grid: 2 };
        assert_eq!(Ways::new(65_536, true).force(kernel).of(Direction::Gather, 9), kernel);
        assert_eq!(Ways::new(512, false).force(kernel).of(Direction::Gather, 9), Way::Copies);
        assert_eq!(Ways::new(512, true).force(Way::Copies).of(Direction::Scatter, 9), Way::Copies);
    }
}
