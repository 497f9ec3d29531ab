//! The cache over the tiers: where each page of a prompt is, from the device down to a store that
//! others share, and what is to be where next.
//!
//! **What it is for.** [`PageTable`] says in one walk how far a prompt is known and on which tiers
//! each stretch of it lies; who brings pages to a tier, and who needs them there, say so in it; and
//! it names what a full tier can best do without, ends of prompts before their beginnings.
//!
//! **What it promises.** A walk takes no lock that anybody holds while bytes move, or for longer than
//! it takes to move some hundred entries. A page that is locked on a tier is not given away there.
//!
//! [`remote`] is the slowest of the tiers: a place that several machines reach. [`cache`] is all of them
//! as one.
//!
//! **What it may not know.** Sockets, engines. A page is a hash here, in a scope whose keys
//! chain, so that equal hashes have equal pages before them.

#![forbid(unsafe_code)]

pub mod cache;
pub mod gate;
pub mod remote;
mod table;

pub use ritornello_format::residency::Tier;
pub use table::{PageTable, Phase, Span, TableStats, Victim};
