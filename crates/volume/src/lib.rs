//! # ritornello-volume
//!
//! Moves pages between memory and segment files. `Segments` opens the files and moves runs of pages
//! in the best I/O mode that works (`io_uring`, a thread pool, the page cache, or copies where the
//! files are in memory), with checksums over their headers and pages. `Staging` is the memory, in
//! huge pages where the machine has them, that pages pass through if the caller's own memory cannot
//! be used for direct I/O, makes this I/O slow, or is needed back before the I/O ends. `space`
//! allocates extents. `baseline` measures the speed of disk and memory. `ThreadPool` runs jobs on
//! threads, for this crate and the crates above it.
//!
//! **Promises.** If a read reports a page as verified, the caller's memory holds the page that was
//! written under its key in its generation: byte for byte, unless a lossy codec encoded the page.
//! Any other outcome is a miss with a reason, never a panic. When a call returns, its I/O has
//! completed, except reads into memory of this crate that a stopped call leaves behind: no I/O uses
//! the caller's memory. Memory is bounded by the bytes that each call keeps in flight, by the
//! number of calls that may leave reads behind, and by the length of staging.
//!
//! **Must not know** which pages exist, which client requests pages, or which space may be
//! overwritten: the caller supplies the places of runs.

pub mod baseline;
mod fork_safe_lock;
mod io_engine;
mod map;
mod memory_block;
mod open_files;
pub mod page_memory;
mod process;
mod scoped_threads;
pub mod segments;
pub mod space;
pub mod staging;
mod thread_pool;
pub mod transfer;

pub use fork_safe_lock::ForkSafeLock;
pub use open_files::OTHER_FILES;
pub use page_memory::{
    BorrowedPages, BorrowedPagesMut, Fragment, FragmentMut, OwnedPages, PageSource, PageTarget,
};
pub use process::{heap_bytes, process_id};
pub use scoped_threads::run_on_threads;
pub use segments::{IoChoice, IoMode, IoReport, Segments, SegmentsConfig};
pub use staging::{Backing, StagedPages, Staging, StagingBuffer, StagingStats};
pub use thread_pool::{Job, ThreadPool};
pub use transfer::{
    Control, Encoded, MissReason, Pack, PackedPages, Packing, PageOutcome, RunRead, RunWrite,
    SalvagedRun, Sections, Unpack, VerifiedRun,
};
