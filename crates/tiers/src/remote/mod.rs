//! The remote tier: pages in a store shared by several machines. A [`Backend`] gives access to the
//! store; three of its methods are required.
//!
//! Pages are packed into objects with a header: at most 8 MiB of pages, or one longer page
//! ([`packing`], [`object`]). The name of an object is derived from its scope, the key of its last
//! page and its number of pages: writers of the same pages write the same name, and existence can
//! be queried without a listing. A fetched object is used only if its header and checksums match
//! the request and, if a key is given, a holder of the key wrote the object ([`seal`]). A remote
//! that is slow, unreachable or faulty causes misses, but fails no request ([`call_executor`]).

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
mod keyed_backend;
mod keyring;
mod memory;
mod object;
mod object_finder;
mod object_read;
mod options;
mod packing;
mod read_failures;
mod rejected;
mod remote_tier;
mod seal;

pub use address::RemoteAddress;
pub use backend::{Backend, Listed};
pub use backend_check::check_backend;
pub(crate) use call_executor::CallCounters;
pub use call_executor::RemoteCalls;
pub use collect::{CollectOptions, Collected, collect};
pub use conformance::{Check, conformance};
pub use directory::DirectoryBackend;
pub use faults::{BackendFault, FaultyBackend};
pub use fsck::{RemoteCheck, fsck};
pub use inventory::{Inventory, Object};
pub use keyring::KeyRing;
pub use memory::MemoryBackend;
pub use options::RemoteOptions;
pub use packing::{Form, Prompt};
pub(crate) use packing::{group_pages, step_pages};
pub use rejected::RejectedObjects;
pub(crate) use remote_tier::FAILED_OBJECTS_MAX;
pub use remote_tier::{RemoteStats, RemoteTier};
