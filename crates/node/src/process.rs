//! Which process a value belongs to. After `fork` the child holds copies of everything its parent
//! had open, and must use none of it: the threads behind it are not there, locks are not its own,
//! and the sockets are shared.

use ritornello_format::{Error, ErrorKind, Result};

/// The process that made a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process(u32);

impl Process {
    /// This one.
    pub(crate) fn current() -> Self {
        Self(ritornello_volume::process_id())
    }

    /// Whether the caller is still the process that made the value.
    pub(crate) fn is_current(self) -> bool {
        self == Self::current()
    }

    /// Refuses a handle that came here by `fork`. To be asked before any lock is taken: another
    /// thread of the parent may have held it, and in the child nobody will ever let go of it.
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
