//! # ritornello-lab
//!
//! The laboratory of the command `ritornello`: `bench` measures the store and its parts against the
//! limits of the machine and against each other, and `soak` puts a small store under load, faults
//! and kills for a long time.
//!
//! **Promises.** Bytes that a measurement of throughput gets from a store or from the remote tier
//! are compared with the bytes put, except pages that a lossy codec encodes. Files of a measurement
//! are removed when it ends, also by Ctrl-C, but not by SIGKILL. The objects that `bench remote`
//! writes stay after Ctrl-C.
//!
//! **Must not know** the other subcommands, which are in the crate `ritornello-operations`.

#![forbid(unsafe_code)]

pub mod bench;
mod random;
pub mod soak;
