//! Tiers of KV pages: records which tiers hold each page of a prompt, from the device to a store
//! shared by several machines, and moves pages between tiers.
//!
//! **Purpose.** [`PageTable`] answers in one walk how many leading pages of a prompt are stored,
//! and on which tiers. Before a caller moves pages to a tier it claims them in the table, so that
//! no other caller moves them too. A caller locks pages while it uses them. For a full tier the
//! table chooses the pages to evict, ends of prompts before their beginnings. [`remote`] is the
//! slowest tier, shared by several machines. [`cache`] combines all tiers.
//!
//! **Promises.** A walk waits for no lock that is held while bytes move, and for no lock that is
//! held longer than it takes to change the entries of 512 pages. A page locked on a tier is not
//! evicted from this tier.
//!
//! **Must not know** sockets and engines. The page table identifies a page by its hash, in a scope
//! whose keys chain: pages with equal hashes have equal pages before them.

#![forbid(unsafe_code)]

pub mod cache;
pub mod gate;
pub mod remote;
mod table;

pub use ritornello_format::residency::Tier;
pub use table::{EvictedPages, PageTable, Residence, TableSpan, TableStats};
