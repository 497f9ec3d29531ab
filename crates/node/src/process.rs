//! The process that a value belongs to. After `fork` the child holds copies of all open resources
//! of its parent. The child must not use these resources: their threads do not exist in the child,
//! their locks belong to the parent, and the parent uses the same sockets.

use ritornello_format::{Error, ErrorKind, Result};

/// The process that created a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process(u32);

impl Process {
    pub(crate) fn current() -> Self {
        Self(ritornello_volume::process_id())
    }

    /// Whether the caller is still the process that created the value.
    pub(crate) fn is_current(self) -> bool {
        self == Self::current()
    }

    /// Rejects a handle that was inherited by `fork`. Called before any lock is taken: a thread of
    /// the parent may have held the lock, and in the child it is never released.
    pub(crate) fn check(self) -> Result<()> {
        if self.is_current() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Closed,
            "this store was opened before fork: open it again in the child",
        ))
    }
}
