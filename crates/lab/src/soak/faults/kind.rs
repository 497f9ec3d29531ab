//! The kinds of faults of `soak --faults`, and how each begins and ends.

use super::foreign::ForeignOwner;
use super::message::{InjectedError, Order};
use super::process::Process;
use ritornello_terminal::exit::Failure;
use rustix::process::Signal;
use serde::Serialize;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

/// Scopes that a client registers in one fault, each with a page.
const SCOPES_PER_STORM: u64 = 300;
/// Soft limit of open files, less than the number of files of a store.
const FEW_FILES: u64 = 24;
/// The user to whom a fault gives a directory: any user except the current user.
const OTHER_UID: u32 = 65_534;

/// The kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
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

impl FaultKind {
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

    /// Returns the name in text output.
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
            Self::OtherCapacity => "restarted with a different capacity",
            Self::OtherVersion => "owner of a different version",
            Self::ManySalts => "many new scopes",
        }
    }
}

/// A store and its clients.
pub struct Cluster<'a> {
    pub store: PathBuf,
    pub capacity: u64,
    pub clients: Vec<Process<'a>>,
}

/// A fault in progress, and the state that its end must restore.
pub enum Fault {
    /// The end of the fault restores no state.
    Passed,
    /// The client with this number was stopped.
    Stopped(usize),
    /// Syncs, calls that take space, or opens of all clients fail with an [`InjectedError`].
    Broken,
    /// The directory was moved to `away`. The directory that takes its place is moved to `aside` at
    /// the end of the fault.
    Moved { away: PathBuf, aside: PathBuf },
    /// The directory was given to another user, or its permissions were removed. `mode` and `user`
    /// are its mode and its user before the fault.
    Permitted { mode: u32, user: u32 },
    /// This process owns the directory, and refuses the clients as an owner of an unknown protocol
    /// version.
    Foreign(ForeignOwner),
}

impl Cluster<'_> {
    /// Begins a fault.
    ///
    /// # Errors
    /// If the fault cannot be injected on this machine.
    pub fn begin(&mut self, kind: FaultKind) -> Result<Fault, Failure> {
        let owner = self.clients.iter().position(|client| client.reports().state.role == "owner");
        let owner = owner.unwrap_or(0);
        let other = (owner + 1) % self.clients.len();
        match kind {
            FaultKind::OwnerKilled => self.restart(owner, self.capacity, None)?,
            FaultKind::ClientKilled => self.restart(other, self.capacity, None)?,
            FaultKind::FewOpenFiles => {
                self.restart(other, self.capacity, Some(FEW_FILES))?;
                self.restart(owner, self.capacity, Some(FEW_FILES))?;
            }
            FaultKind::OtherCapacity => {
                self.restart(other, self.capacity / 4 * 3, None)?;
                self.restart(owner, self.capacity / 8 * 7, None)?;
            }
            FaultKind::OwnerStopped => return Ok(self.stop(owner)),
            FaultKind::ClientStopped => return Ok(self.stop(other)),
            FaultKind::SyncsFail => return Ok(self.break_all(InjectedError::Sync)),
            FaultKind::DiskFull => return Ok(self.break_all(InjectedError::Space)),
            FaultKind::OpensFail => return Ok(self.break_all(InjectedError::Files)),
            FaultKind::ManySalts => {
                self.clients[other].order(&Order::RegisterScopes(SCOPES_PER_STORM))
            }
            FaultKind::DirectoryLate => {
                let away = self.store.with_extension("away");
                let aside = self.store.with_extension("below");
                self.clients.iter_mut().for_each(Process::kill);
                let _ = std::fs::remove_dir_all(&aside);
                std::fs::rename(&self.store, &away)?;
                // The clients create a new store at the path of the moved directory, and must leave
                // the new store when the directory returns.
                self.start_all()?;
                return Ok(Fault::Moved { away, aside });
            }
            FaultKind::DirectoryForeign => {
                self.clients.iter_mut().for_each(Process::kill);
                let found = std::fs::metadata(&self.store)?;
                let before = Fault::Permitted { mode: found.mode() & 0o7777, user: found.uid() };
                // Permissions do not restrict root, so root gives the directory to another user.
                if rustix::process::geteuid().is_root() {
                    chown(&self.store, Some(OTHER_UID), None)?;
                } else {
                    permit(&self.store, 0)?;
                }
                self.start_all()?;
                return Ok(before);
            }
            FaultKind::OtherVersion => {
                self.clients.iter_mut().for_each(Process::kill);
                let foreign = ForeignOwner::take(&self.store)?;
                self.start_all()?;
                return Ok(Fault::Foreign(foreign));
            }
        }
        Ok(Fault::Passed)
    }

    /// Ends a fault.
    ///
    /// # Errors
    /// If the previous state cannot be restored.
    pub fn end(&mut self, fault: Fault) -> Result<(), Failure> {
        match fault {
            Fault::Passed => {}
            Fault::Stopped(client) => self.clients[client].signal(Signal::CONT),
            Fault::Broken => self.clients.iter_mut().for_each(|client| client.order(&Order::Heal)),
            Fault::Moved { away, aside } => match std::fs::rename(&self.store, aside) {
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

    /// Starts every client. No client may be running.
    ///
    /// # Errors
    /// If a client cannot be started.
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

    fn break_all(&mut self, trouble: InjectedError) -> Fault {
        self.clients.iter_mut().for_each(|client| client.order(&Order::Break(trouble)));
        Fault::Broken
    }
}

fn permit(path: &Path, mode: u32) -> std::io::Result<()> {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
}
