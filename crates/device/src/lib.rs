//! # ritornello-device
//!
//! Moves pages between pinned host memory (slots) and the memory of a device in which a serving
//! engine keeps keys and values (a pool).
//!
//! **Promises.** An event is complete only after all bytes of its move have arrived. A move writes
//! the bytes of its blocks, or of its slots, and no others. After an error of the driver the device
//! is broken: later moves are refused, moves in flight end when the driver reports that their work
//! has ended or the device has failed, and memory that the device may still access is never reused.
//!
//! **Must not know** what pages are, or when a block may be overwritten: the caller makes moves
//! wait for the engine's work by marks ([`Device::mark`]), and makes the engine's work wait for
//! moves by fences ([`MoveTicket::fence`], [`SaveFence`]).

mod core;
mod device;
pub mod driver;
pub mod layout;
mod load;
mod mover;
mod pool;
mod save;
mod slots;
mod table;
mod way;
mod windows;

pub use crate::core::Event;
pub use device::{Device, WayChoice};
pub use load::{Moved, Read};
pub use mover::{Done, MoveTicket};
pub use pool::{Owner, Pool};
pub use save::{Save, SaveFence, Write};
pub use slots::Slots;
pub use table::{TABLE_PAGES_MAX, Table};
pub use way::{Measured, Way, Ways};
