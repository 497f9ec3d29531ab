//! Small files that are read whole, at start and again while the service runs.

use ritornello_format::{Error, Result};
use rustix::fs::OFlags;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// A file to read, its maximum length, and the permissions and the owner that it must have.
pub(crate) struct GuardedFile<'a> {
    /// The kind of file, for errors: "token file".
    pub(crate) name: &'static str,
    pub(crate) path: &'a Path,
    pub(crate) bytes_max: u64,
    /// Permission bits that the file must not have, and how to remove them.
    pub(crate) forbidden: (u32, &'static str),
    /// The owner that the file must have: with `Some(true)` root or the user of this process, with
    /// `Some(false)` the user of this process; with `None` any user may own the file.
    pub(crate) owned_by_root: Option<bool>,
}

impl GuardedFile<'_> {
    /// Checks the type, owner and permissions of the file, and reads it. The file that is read is
    /// the file that was checked, also if another file takes its name in between.
    ///
    /// # Errors
    /// `Invalid` if the file cannot be read, is not a regular file, is too long, or its owner or
    /// permissions are not as required. No error contains a part of the file.
    pub(crate) fn read(&self) -> Result<Vec<u8>> {
        let name = self.name;
        let failed = |text: String| Error::invalid(text).with("file", self.path.display());
        // Without this flag the open of a pipe would wait for a writer.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let opened = File::options().read(true).custom_flags(flags).open(self.path);
        let file = opened.map_err(|error| {
            failed(format!("the {name} cannot be opened: name a file that this user can read"))
                .because(error)
        })?;
        let found = file.metadata()?;
        if !found.is_file() {
            return Err(failed(format!("the {name} is not a regular file: name another file")));
        }
        let (forbidden, remedy) = self.forbidden;
        if found.mode() & forbidden != 0 {
            let mode = format!("{:o}", found.mode() & 0o777);
            return Err(failed(format!("other users have access to the {name}: {remedy}"))
                .with("mode", mode));
        }
        let user = rustix::process::geteuid().as_raw();
        if self.owned_by_root.is_some_and(|root| found.uid() != user && !(root && found.uid() == 0))
        {
            return Err(failed(format!("the {name} belongs to another user: chown the file"))
                .with("owner", found.uid()));
        }
        let mut bytes = Vec::new();
        file.take(self.bytes_max + 1)
            .read_to_end(&mut bytes)
            .map_err(|error| failed(format!("the {name} cannot be read")).because(error))?;
        if bytes.len() as u64 > self.bytes_max {
            return Err(failed(format!("the {name} is too long: name another file"))
                .with("max_bytes", self.bytes_max));
        }
        Ok(bytes)
    }
}
