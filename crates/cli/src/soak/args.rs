//! What can be typed after `soak`.

use clap::Args;
use ritornello_format::parse_bytes;
use ritornello_store::IndexKind;
use std::path::PathBuf;

/// Of `soak`.
#[derive(Debug, Args)]
#[command(after_help = "\
Writers and readers in this process and in one more work on a small store that is always full: they
put, get, touch, lease, delete and flush, and now and then drop a whole scope. Some pages are
retained for some seconds. Meanwhile the store shrinks and grows, between a half of its capacity and
all of it, directories are added and drained, codecs and quotas are changed, and everything is
scrubbed. Every byte that is got is compared with what follows from its key, and what is allocated
with the capacity. Again and again the store is closed and opened, or one of the processes is
killed: a client with puts on their way, or the owner, whose place the other one takes. At the end
every page is verified as `fsck` does it.

Growth is that of this process between shifts, when no store is open: open files, threads, and bytes
allocated on the heap. It is the median of the last third of the shifts less that of the second one;
the first one is for warming up. Resident memory is not looked at: the stacks of threads that ended
stay for others, and it goes up and down by megabytes.

With --faults two clients work on one store as engines do, and one fault after another is made under
them: processes are killed and stopped, fdatasync and opens fail, the disk is full, the directory is not
there yet or another user's, an owner speaks another version, a client restarts with another capacity
or few open files, hundreds of scopes are made. After each, every client must serve again within
--within seconds, by itself, and all that a flush has covered must be found. Failing system calls are
injected at the seam to the file system; everything else is real.

Exit code 0: nothing wrong; 1: wrong bytes, damaged pages, more bytes than the capacity, flushed
pages lost, a client that did not serve again in time, or a store that refused to go on; 3: something hung for two minutes.

Examples:
  ritornello soak --minutes 10
  ritornello soak --minutes 600 --dir /nvme --capacity 2GiB --index lsm
  ritornello soak --faults --minutes 30 --dir /nvme
  ritornello soak --minutes 0.2 --seed 7 --json | jq .wrong_bytes")]
pub struct SoakArgs {
    /// How long, in minutes; parts of one as well
    #[arg(long, default_value_t = 10.0, value_parser = minutes)]
    pub minutes: f64,
    /// Budget of the store
    #[arg(long, default_value = "256MiB", value_parser = size)]
    pub capacity: u64,
    /// Index of the store: one that is compiled in
    #[arg(long, default_value = "run", value_parser = index)]
    pub index: IndexKind,
    /// A directory on the disk to use; what is made there is removed
    #[arg(long, default_value = ".")]
    pub dir: PathBuf,
    /// What the choices of all threads follow from
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Two clients and one fault after another, instead of the above
    #[arg(long)]
    pub faults: bool,
    /// With --faults: seconds from the end of a fault within which every client must serve again
    #[arg(long, default_value_t = 10.0, requires = "faults")]
    pub within: f64,
    /// Works on this store until standard input ends: the other process
    #[arg(long, hide = true)]
    pub join: Option<PathBuf>,
    /// With --faults and --join: the client's number, and that of its first sequence behind a colon
    #[arg(long, hide = true, requires = "join", value_parser = client)]
    pub client: Option<(u64, u64)>,
    /// With --client: the soft limit of open files
    #[arg(long, hide = true, requires = "client")]
    pub open_files: Option<u64>,
}

fn minutes(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(minutes) if minutes > 0.0 && minutes <= 1e6 => Ok(minutes),
        _ => Err("a number of minutes above zero".to_owned()),
    }
}

fn client(text: &str) -> Result<(u64, u64), String> {
    let numbers = text
        .split_once(':')
        .and_then(|(number, from)| Some((number.parse().ok()?, from.parse().ok()?)));
    numbers.ok_or_else(|| "two numbers with a colon between them".to_owned())
}

fn index(text: &str) -> Result<IndexKind, String> {
    IndexKind::parse(text).map_err(|error| error.to_string())
}

fn size(text: &str) -> Result<u64, String> {
    parse_bytes(text).map_err(|error| error.to_string())
}
