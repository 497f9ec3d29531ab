//! Tiers of KV pages: on which tiers each page of a prompt lies, from the device to a store shared
//! by several machines, and where pages should go next.
//!
//! **Purpose.** [`PageTable`] answers in one walk how many leading pages of a prompt are stored,
//! and on which tiers. Transfers to a tier are claimed in it, and pages in use are locked in it. It
//! chooses the pages that a full tier evicts, ends of prompts before their beginnings. [`remote`]
//! is the slowest tier, shared by several machines. [`cache`] presents all tiers as one.
//!
//! **Promises.** A walk waits for no lock that is held while bytes move, or for longer than some
//! hundred table entries take to change. A page locked on a tier is not evicted from it.
//!
//! **Must not know** sockets and engines. A page is a hash here, in a scope whose keys chain: equal
//! hashes have equal pages before them.

#![forbid(unsafe_code)]

pub mod cache;
pub mod gate;
pub mod remote;
mod table;

pub use ritornello_format::residency::Tier;
pub use table::{EvictedPages, PageTable, Residence, TableSpan, TableStats};
