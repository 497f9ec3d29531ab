//! # ritornello-node
//!
//! Many processes, one store, no service: [`open`] makes this process the owner of a directory or
//! a client of the process that owns it, behind the same [`Node`].
//!
//! ```text
//!   Node ── Store ── FailoverCatalog ──┬── LocalCatalog of the engine       this process owns the store
//!                             └── SocketCatalog ─ Client ─╮          another one does
//!                                                  │ owner.sock
//!                              Connections ── Server ───╯          in that other one
//! ```
//!
//! **Who owns.** Whoever holds the POSIX record lock on `LOCK` (`record_lock.rs` says why that kind).
//! The kernel takes it from a process that dies. Direct writes of that process may land after that:
//! the next owner drains the segments before it reuses their free space.
//!
//! **Who may be writing.** A client holds a lock of its own, on `clients/<random name>`. The engine
//! logs the name with every reservation, so that the next owner can tell a slow client from a dead
//! one. See `presence.rs`.
//!
//! **When the owner goes away**, clients notice at their next call (or during it), race for the
//! lock, and one recovers the store while the others connect to it: callers see a delay. A client
//! comes back under a *new* name, and lets go of the old one when it has no reservation left under
//! it; what it was never told of goes back to the store with the name. Leases of a former owner are
//! void. Everything is asked again by itself except `commit`: that fails with `Retry`, and the
//! pages may be put again. A `flush` that follows the death of an owner fails, once, if that owner
//! had acknowledged puts to this process that no flush has covered, also of pages that another
//! process wrote: they may be gone.
//!
//! **When a write or sync of the owner fails**, its engine is poisoned, and the owner opens another
//! one in its place when the disks take writes again (`heal.rs`). To clients that is the death of one
//! owner and the coming of the next, with misses at once in between.
//!
//! **Fork.** A child gets no locks. Handles of its parent answer `Closed` in it, and leave alone
//! what it shares with the parent; opening the directory again makes the child a client.
//!
//! **Promises.** Never two owners. No space is reused that a process may still write to. No
//! call waits without a deadline. A peer that sends nonsense loses its connection and nothing else.
//!
//! **May not know** what pages hold, or where they are kept: that is the store's.

#![forbid(unsafe_code)]

mod answer;
mod authority;
mod channel;
mod client;
mod connections;
mod convert;
mod destroy;
mod exclusive;
mod failover_catalog;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod greeting;
mod heal;
mod keys;
mod liveness;
mod lock;
mod membership;
mod memory_budget;
mod mismatch;
mod node;
mod node_directory;
mod owner;
mod owner_epoch;
mod owner_lost;
mod permissions;
mod presence;
mod process;
mod protocol;
mod record_lock;
mod registry;
mod reopening;
mod reservations;
mod server;
mod shared;
mod socket;
mod socket_catalog;

pub use convert::convert_index;
pub use destroy::destroy;
pub use node::{Node, Role, open, open_on};
pub use ritornello_store::{Durability, IndexKind, Options};
