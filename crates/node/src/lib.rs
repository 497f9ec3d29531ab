//! # ritornello-node
//!
//! Many processes, one store, no service: [`open`] makes this process the owner of a directory or a
//! client of the owning process. Owner and client use the same [`Node`].
//!
//! ```text
//!   Node ── Store ── FailoverCatalog ──┬── LocalCatalog of the core      this process owns the store
//!                                      └── Client ─╮                    another process owns it
//!                                                  │ owner.sock
//!                         Connections ── Server ───╯                    in the owning process
//! ```
//!
//! **Ownership.** The owner is the process that holds the POSIX record lock on `LOCK`
//! (`record_lock.rs` explains the choice of lock). The kernel releases the lock when the process
//! dies. Direct writes of that process may reach the disk afterwards, so the next owner drains the
//! segments before it reuses their free space.
//!
//! **Writers.** A client holds a lock on its own file, `clients/<random name>`. The core logs the
//! name with every reservation, so that the next owner can distinguish a slow client from a dead
//! client. See `presence.rs`.
//!
//! **Observers.** [`observe`] asks the owner for its statistics, or reads the files of a store that
//! no process owns. An observer never takes the lock, and becomes a client, for one call, only if
//! the owner speaks no protocol version with observers. [`explain`] and [`explain_request`] ask the
//! owner why pages are hits or misses, as a client for one call.
//!
//! **Owner failure.** Clients notice the death at their next call, or during a call, and try to
//! take the lock. The client that gets the lock recovers the store, the other clients connect to
//! this new owner, and callers see a delay. A client reconnects under a *new* name and releases the
//! old name when no reservation is left under it; the release also returns the space of
//! reservations whose response the client never received. Leases that a former owner granted are
//! void. Every call that waits for an answer is retried automatically, except `commit`, which fails
//! with `Retry`; the pages may be put again ([`ritornello_store::rule`]). The first `flush` after
//! the death of an owner fails if the owner had acknowledged puts or deletes to this process that
//! no successful flush has followed, because such puts and deletes may be lost. A put also
//! acknowledges pages that it found present and that another process wrote.
//!
//! **Failed writes.** A failed sync, or a failed write of metadata, poisons the owner's
//! `StoreCore`, which then refuses writes. The owner opens another core in its place when the disks
//! accept writes again (`heal.rs`). To clients this looks like the death of one owner and the start
//! of the next, except that their calls miss immediately in between.
//!
//! **Fork.** A child inherits no locks. In the child, requests to a store that the parent opened
//! fail with `Closed` and do not touch shared state; [`Node::close`] does nothing. The child
//! becomes a client when it opens the directory again.
//!
//! **Promises.** Never two owners. No space is reused while a process may still write to it. A
//! client's call waits for its owner for a limited time only. A peer that sends malformed messages
//! loses its connection and nothing else.
//!
//! **Must not know** page contents or locations; both belong to the store.

#![forbid(unsafe_code)]

mod authority;
mod channel;
mod client;
mod connections;
mod convert;
mod current_membership;
mod destroy;
mod exclusive;
mod failover_catalog;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod greeting;
mod handshake;
mod heal;
mod heal_signal;
mod liveness;
mod lock;
mod membership;
mod memory_budget;
mod mismatch;
mod mounts;
mod node;
mod node_directory;
mod observe;
mod open_context;
mod open_stores;
mod owner;
mod owner_lost;
mod permissions;
mod presence;
mod process;
mod protocol;
mod record_lock;
mod reopening;
mod reports;
mod restore;
mod server;
mod shared;
mod socket;
mod statistics;

pub use convert::convert_index;
pub use destroy::destroy;
pub use membership::Role;
pub use node::{Node, open, open_on};
pub use observe::{Observed, decisions, explain, explain_request, observe, owner_stats};
pub use restore::restore;
pub use ritornello_store::{Durability, IndexKind, Options};
