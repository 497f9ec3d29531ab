//! Arguments of `soak`.

use clap::Args;
use ritornello_store::IndexKind;
use ritornello_terminal::value::size;
use std::path::PathBuf;

/// Bytes per segment: small, so that a small store has several.
pub const SEGMENT_BYTES: u64 = 4 << 20;

/// Arguments of `soak`.
#[derive(Debug, Args)]
#[command(after_help = "\
Writers and readers in this process and in a peer process work on a small store that is always full:
they put, get, touch, lease, delete and flush, and sometimes drop a scope. Some pages are retained
for 1 to 20 seconds. During this work the capacity changes between a half of --capacity and all of
it, directories are added and drained, codecs and quotas change, and all pages are scrubbed. While
the store has several directories, long pages are divided over them. Every byte read is compared
with the byte that its key implies, and allocated bytes with the capacity. In cycles the store is
closed and reopened, or one of the processes is killed: a client with puts in flight, or the owner,
from which the other process takes over. At the end every page is verified as by `fsck`.

Growth is measured in this process between cycles, when no store is open: open files, threads, and
bytes allocated on the heap. It is the median of the last third of the cycles less the median of the
second third; the first third warms up. Resident memory is not compared, because it varies by
megabytes, for example with the reused stacks of ended threads.

With --faults two clients work on one store as engines do, under one fault after another: processes
are killed and stopped, fdatasync and opens fail, the disk is full, the directory is moved away and
back, as if mounted late, or belongs to another user, an owner speaks another version, a client
restarts with another capacity or few open files, hundreds of scopes are registered. After each
fault every client must serve again within --within seconds, without help, and all flushed pages
must be found. Failing system calls are injected between the store and the file system.

Exit code 0: no error; 1: wrong bytes, damaged pages, more bytes than the capacity, a store that
failed, or, with --faults, flushed pages lost or a client that did not serve again in time, hung or
did not end cleanly; 3: a call hung for two minutes without --faults, or the soak itself failed, for
example because it could not start a process.

Examples:
  ritornello soak --minutes 10
  ritornello soak --minutes 600 --dir /nvme --capacity 2GiB --index lsm
  ritornello soak --faults --minutes 30 --dir /nvme
  ritornello soak --minutes 0.2 --seed 7 --json | jq .wrong_bytes")]
pub struct SoakArgs {
    /// Duration in minutes; fractions are allowed
    #[arg(long, default_value_t = 10.0, value_parser = minutes)]
    pub minutes: f64,
    /// Capacity of the store
    #[arg(long, default_value = "256MiB", value_parser = size)]
    pub capacity: u64,
    /// Index of the store: run, or another compiled-in index
    #[arg(long, default_value = "run", value_parser = index)]
    pub index: IndexKind,
    /// A directory on the disk to use; created files are removed
    #[arg(long, default_value = ".")]
    pub dir: PathBuf,
    /// Seed of the choices of all threads
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Run two clients under one fault after another, instead of the load with a peer process
    #[arg(long)]
    pub faults: bool,
    /// With --faults: seconds from the end of a fault within which every client must serve again
    #[arg(long, default_value_t = 10.0, requires = "faults")]
    pub within: f64,
    /// Run the peer process: works on this store until standard input ends
    #[arg(long, hide = true)]
    pub join: Option<PathBuf>,
    /// With --faults and --join: the client's number and its first sequence's number, as N:M
    #[arg(long, hide = true, requires = "join", value_parser = client)]
    pub client: Option<(u64, u64)>,
    /// With --client: soft limit of open files
    #[arg(long, hide = true, requires = "client")]
    pub open_files: Option<u64>,
}

fn minutes(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(minutes) if minutes > 0.0 && minutes <= 1e6 => Ok(minutes),
        _ => Err("expected a number of minutes above zero, at most 1000000".to_owned()),
    }
}

fn client(text: &str) -> Result<(u64, u64), String> {
    let numbers = text
        .split_once(':')
        .and_then(|(number, from)| Some((number.parse().ok()?, from.parse().ok()?)));
    numbers.ok_or_else(|| "expected two numbers with a colon between them".to_owned())
}

fn index(text: &str) -> Result<IndexKind, String> {
    IndexKind::parse(text).map_err(|error| error.to_string())
}
