//! The speed of the kernels of the emulated device on one thread, relative to `memcpy`.
//!
//!     cargo run --release -p ritornello-device --features emulated --example emulated_speed

use ritornello_device::driver::Launch;
use ritornello_device::driver::emulated::run_kernel;
use ritornello_device::layout::{Direction, Kernel, Layout, MoveEntry, Span, Word};
use std::hint::black_box;
use std::time::Instant;

const BYTES: usize = 256 << 20;
const RUNS: usize = 5;

fn main() -> ritornello_format::Result<()> {
    let (pool, mut arena) = (vec![1_u8; BYTES + 256], vec![2_u8; BYTES + 4096]);
    let mut target = vec![3_u8; BYTES];
    let copy = best(|| black_box(&mut target).copy_from_slice(black_box(&arena[..BYTES])));
    println!("memcpy {:.1} GB/s", BYTES as f64 / copy / 1e9);
    let skip = arena.as_ptr().align_offset(4096);
    // CUDA aligns memory to 256 bytes.
    let base = pool.as_ptr() as u64 + pool.as_ptr().align_offset(256) as u64;
    for piece in [4096, 8192, 65_536] {
        for word in [Word::B16, Word::B8, Word::B4, Word::B1] {
            for direction in [Direction::Scatter, Direction::Gather] {
                let spans = 8.min(65_536 / piece);
                let page = piece * spans;
                let blocks = BYTES / page;
                let list: Vec<Span> = (0..spans)
                    .map(|span| Span {
                        base: base + (span * piece) as u64,
                        bytes: piece as u32,
                        stride: page as u64,
                    })
                    .collect();
                let layout = Layout::new(&list, blocks as u32)?;
                let moves: Vec<MoveEntry> = (0..blocks as u32)
                    .map(|block| MoveEntry { block, slot: block * (page / 4096) as u32 })
                    .collect();
                let part = layout.whole();
                let launch = Launch {
                    kernel: Kernel { direction, word },
                    grid: 4,
                    spans: layout.spans().as_ptr() as u64,
                    count: part.count(),
                    units: part.units,
                    moves: moves.as_ptr() as u64,
                    pages: moves.len() as u32,
                    arena: arena[skip..].as_mut_ptr() as u64,
                };
                // SAFETY: tables and memory live until the end of the loop, and nothing else
                // accesses them.
                let time = best(|| unsafe { run_kernel(&launch) });
                println!(
                    "pieces of {piece:6} bytes, words of {:2} bytes, {direction:?}: {:.1} GB/s, \
                     {:.2} of memcpy",
                    word.bytes(),
                    BYTES as f64 / time / 1e9,
                    copy / time
                );
            }
        }
    }
    Ok(())
}

/// The shortest time of [`RUNS`] calls of `run`, in seconds.
fn best(mut run: impl FnMut()) -> f64 {
    let times = (0..RUNS).map(|_| {
        let began = Instant::now();
        run();
        began.elapsed().as_secs_f64()
    });
    times.fold(f64::INFINITY, f64::min)
}
