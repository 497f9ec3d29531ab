//! The remote tier: pages in a store that several machines reach, through three methods.
//!
//! Pages are packed into objects of several MiB with a header in front ([`spans`], [`object`]), whose
//! names follow from what they hold, so that writers never conflict and existence can be asked for
//! without a listing. Whatever a remote answers is believed only if header and checksums agree with
//! what was asked for, and, where a key is given, if a holder of it wrote that ([`seal`]). A remote that is slow, dead or wrong costs hits, never requests ([`guard`]).

mod address;
mod backend;
mod backend_check;
mod breaker;
mod call_executor;
mod collect;
mod conformance;
mod directory;
mod existence_cache;
mod faults;
mod fsck;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod inventory;
mod keyring;
mod memory;
mod object;
mod read_failures;
mod refused;
mod seal;
mod spans;
mod tier;

pub use address::RemoteAddress;
pub use backend::{Backend, Listed};
pub use backend_check::check_backend;
pub use call_executor::RemoteCalls;
pub use collect::{CollectOptions, Collected, collect};
pub use conformance::{Check, conformance};
pub use directory::DirectoryBackend;
pub use faults::{Fault, FaultyBackend};
pub use fsck::{RemoteCheck, fsck};
pub use inventory::{Inventory, Object};
pub use keyring::KeyRing;
pub use memory::MemoryBackend;
pub use refused::RefusedObjects;
pub use spans::Form;
pub use tier::{Prompt, RemoteOptions, RemoteStats, RemoteTier};
