//! The identity of a process that calls the owner.

/// Identifies the calling process: the owner, or a connected client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientId(pub u64);

impl ClientId {
    /// The owner's own process. Reservations with this id are not logged, because after an unclean
    /// end the next owner withholds all free space until no earlier write can be in flight.
    pub const LOCAL: Self = Self(0);
}
