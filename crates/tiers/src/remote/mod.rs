//! The remote tier: pages in a store that several machines reach, through three methods.
//!
//! Pages are packed into objects of several MiB with a header in front ([`spans`], [`object`]), whose
//! names follow from what they hold, so that writers never conflict and existence can be asked for
//! without a listing. Whatever a remote answers is believed only if header and checksums agree with
//! what was asked for, and, where a key is given, if a holder of it wrote that ([`seal`]). A remote that is slow, dead or wrong costs hits, never requests ([`guard`]).

mod address;
mod backend;
mod breaker;
mod census;
mod collect;
mod conformance;
mod directory;
mod examine;
mod faults;
mod fsck;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod guard;
mod keyring;
mod known;
mod memory;
mod object;
mod refused;
mod seal;
mod spans;
mod tier;
mod unreadable;

pub use address::RemoteAddress;
pub use backend::{Backend, Listed};
pub use census::{Census, Object};
pub use collect::{CollectOptions, Collected, collect};
pub use conformance::{Check, conformance};
pub use directory::DirectoryBackend;
pub use examine::examine;
pub use faults::{Fault, FaultyBackend};
pub use fsck::{RemoteCheck, fsck};
pub use guard::RemoteCalls;
pub use keyring::KeyRing;
pub use memory::MemoryBackend;
pub use refused::RefusedObjects;
pub use spans::Form;
pub use tier::{Prompt, RemoteOptions, RemoteStats, RemoteTier};
