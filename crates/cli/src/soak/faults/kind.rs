//! The faults, and how each is made and ended.

use super::foreign::ForeignOwner;
use super::message::{Order, Trouble};
use super::process::Process;
use crate::exit::Failure;
use rustix::process::Signal;
use serde::Serialize;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

/// Scopes that one client makes in one storm.
const SALTS: u64 = 300;
/// A soft limit that leaves no room for a store's files.
const FEW_FILES: u64 = 24;
/// The user that a directory is given to; any that is not this one.
const NOBODY: u32 = 65_534;

/// The kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    OwnerKilled,
    ClientKilled,
    OwnerStopped,
    ClientStopped,
    SyncsFail,
    DiskFull,
    OpensFail,
    FewOpenFiles,
    DirectoryLate,
    DirectoryForeign,
    OtherCapacity,
    OtherVersion,
    ManySalts,
}

impl Kind {
    pub const ALL: [Self; 13] = [
        Self::OwnerKilled,
        Self::ClientKilled,
        Self::OwnerStopped,
        Self::ClientStopped,
        Self::SyncsFail,
        Self::DiskFull,
        Self::OpensFail,
        Self::FewOpenFiles,
        Self::DirectoryLate,
        Self::DirectoryForeign,
        Self::OtherCapacity,
        Self::OtherVersion,
        Self::ManySalts,
    ];

    /// For people.
    pub const fn text(self) -> &'static str {
        match self {
            Self::OwnerKilled => "owner killed",
            Self::ClientKilled => "client killed",
            Self::OwnerStopped => "owner stopped",
            Self::ClientStopped => "client stopped",
            Self::SyncsFail => "fdatasync fails (EIO)",
            Self::DiskFull => "disk full (ENOSPC)",
            Self::OpensFail => "no file descriptors (EMFILE)",
            Self::FewOpenFiles => "low soft limit of open files",
            Self::DirectoryLate => "directory mounted late",
            Self::DirectoryForeign => "directory of another user",
            Self::OtherCapacity => "restarted with another capacity",
            Self::OtherVersion => "owner of another version",
            Self::ManySalts => "many new scopes",
        }
    }
}

/// A store and its clients.
pub struct Scene<'a> {
    pub store: PathBuf,
    pub capacity: u64,
    pub clients: Vec<Process<'a>>,
}

/// How to end a fault.
pub enum Fault {
    /// Nothing.
    Passed,
    /// A client is stopped.
    Stopped(usize),
    /// Operations fail.
    Broken,
    /// The directory is somewhere else. Another one is in its place, which goes `below`.
    Moved { away: PathBuf, below: PathBuf },
    /// The directory had this mode and user.
    Permitted { mode: u32, user: u32 },
    /// Another process has the directory.
    Foreign(ForeignOwner),
}

impl Scene<'_> {
    /// Makes a fault.
    ///
    /// # Errors
    /// If it cannot be made here.
    pub fn begin(&mut self, kind: Kind) -> Result<Fault, Failure> {
        let owner = self.clients.iter().position(|client| client.heard().state.role == "owner");
        let owner = owner.unwrap_or(0);
        let other = (owner + 1) % self.clients.len();
        match kind {
            Kind::OwnerKilled => self.restart(owner, self.capacity, None)?,
            Kind::ClientKilled => self.restart(other, self.capacity, None)?,
            Kind::FewOpenFiles => {
                self.restart(other, self.capacity, Some(FEW_FILES))?;
                self.restart(owner, self.capacity, Some(FEW_FILES))?;
            }
            Kind::OtherCapacity => {
                self.restart(other, self.capacity / 4 * 3, None)?;
                self.restart(owner, self.capacity / 8 * 7, None)?;
            }
            Kind::OwnerStopped => return Ok(self.stop(owner)),
            Kind::ClientStopped => return Ok(self.stop(other)),
            Kind::SyncsFail => return Ok(self.break_all(Trouble::Sync)),
            Kind::DiskFull => return Ok(self.break_all(Trouble::Space)),
            Kind::OpensFail => return Ok(self.break_all(Trouble::Files)),
            Kind::ManySalts => self.clients[other].order(&Order::Salts(SALTS)),
            Kind::DirectoryLate => {
                let away = self.store.with_extension("away");
                let below = self.store.with_extension("below");
                self.clients.iter_mut().for_each(Process::kill);
                let _ = std::fs::remove_dir_all(&below);
                std::fs::rename(&self.store, &away)?;
                // They make a store where the other one is to be, and are to leave it.
                self.start_all()?;
                return Ok(Fault::Moved { away, below });
            }
            Kind::DirectoryForeign => {
                self.clients.iter_mut().for_each(Process::kill);
                let found = std::fs::metadata(&self.store)?;
                let before = Fault::Permitted { mode: found.mode() & 0o7777, user: found.uid() };
                // Permissions do not bind root.
                if rustix::process::geteuid().is_root() {
                    chown(&self.store, Some(NOBODY), None)?;
                } else {
                    permit(&self.store, 0)?;
                }
                self.start_all()?;
                return Ok(before);
            }
            Kind::OtherVersion => {
                self.clients.iter_mut().for_each(Process::kill);
                let foreign = ForeignOwner::take(&self.store)?;
                self.start_all()?;
                return Ok(Fault::Foreign(foreign));
            }
        }
        Ok(Fault::Passed)
    }

    /// Ends it.
    ///
    /// # Errors
    /// If that fails.
    pub fn end(&mut self, fault: Fault) -> Result<(), Failure> {
        match fault {
            Fault::Passed => {}
            Fault::Stopped(client) => self.clients[client].signal(Signal::CONT),
            Fault::Broken => self.clients.iter_mut().for_each(|client| client.order(&Order::Heal)),
            Fault::Moved { away, below } => match std::fs::rename(&self.store, below) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
                _ => std::fs::rename(away, &self.store)?,
            },
            Fault::Permitted { mode, user } => {
                if rustix::process::geteuid().is_root() {
                    chown(&self.store, Some(user), None)?;
                }
                permit(&self.store, mode)?;
            }
            Fault::Foreign(owner) => drop(owner),
        }
        Ok(())
    }

    /// Starts every client that does not run.
    ///
    /// # Errors
    /// If one cannot be started.
    pub fn start_all(&mut self) -> Result<(), Failure> {
        let capacity = self.capacity;
        self.clients.iter_mut().try_for_each(|client| client.start(capacity, None))
    }

    fn restart(
        &mut self,
        client: usize,
        capacity: u64,
        open_files: Option<u64>,
    ) -> Result<(), Failure> {
        self.clients[client].kill();
        self.clients[client].start(capacity, open_files)
    }

    fn stop(&mut self, client: usize) -> Fault {
        self.clients[client].signal(Signal::STOP);
        Fault::Stopped(client)
    }

    fn break_all(&mut self, trouble: Trouble) -> Fault {
        self.clients.iter_mut().for_each(|client| client.order(&Order::Break(trouble)));
        Fault::Broken
    }
}

fn permit(path: &Path, mode: u32) -> std::io::Result<()> {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
}
