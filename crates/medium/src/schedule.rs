//! The schedule of faults that a [`Faulty`](crate::Faulty) medium injects.

use parking_lot::Mutex;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Kinds of operation of a medium that a [`Schedule`] counts and can make fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Op {
    /// [`Medium::create_dir`](crate::Medium::create_dir).
    CreateDir,
    /// [`Medium::open`](crate::Medium::open).
    Open,
    /// [`Medium::rename`](crate::Medium::rename); its path is the new name.
    Rename,
    /// [`Medium::remove`](crate::Medium::remove).
    Remove,
    /// [`Medium::list`](crate::Medium::list).
    List,
    /// [`Medium::sync_dir`](crate::Medium::sync_dir).
    SyncDir,
    /// [`Medium::room`](crate::Medium::room).
    Room,
    /// [`MediumFile::read_at`](crate::MediumFile::read_at).
    Read,
    /// [`MediumFile::write_at`](crate::MediumFile::write_at).
    Write,
    /// [`MediumFile::sync_data`](crate::MediumFile::sync_data).
    SyncData,
    /// [`MediumFile::allocate`](crate::MediumFile::allocate).
    Allocate,
    /// [`MediumFile::set_len`](crate::MediumFile::set_len).
    SetLen,
    /// [`MediumFile::drain`](crate::MediumFile::drain).
    Drain,
    /// [`MediumFile::length`](crate::MediumFile::length) and `allocated`.
    Stat,
}

/// Interval at which a stalled operation checks whether it may continue.
const STALL_CHECK: Duration = Duration::from_millis(2);

/// Number of kinds in [`Op`].
const OPS: usize = Op::Stat as usize + 1;

/// A fault that is injected into an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MediumFault {
    /// Does nothing and returns `EIO`.
    Io,
    /// Does nothing and returns `ENOSPC`.
    NoSpace,
    /// Does nothing and returns `ENFILE`: the machine has no file handles left.
    NoSystemFiles,
    /// Does nothing and returns `EMFILE`: the process has no file descriptors left.
    NoProcessFiles,
    /// A write stores its first half and returns `EIO`; a read returns its first half as if the
    /// file ended after it. The half is rounded down: to blocks of 4 KiB if the length is a
    /// multiple of 4 KiB, otherwise to sectors of 512 bytes. Other operations: as
    /// [`MediumFault::Io`].
    Short,
    /// Silent damage: a write stores every other 512-byte sector and reports success; a read
    /// returns every other sector with its bits flipped. Other operations: as [`MediumFault::Io`].
    Torn,
    /// Performs the operation after a delay.
    Slow(Duration),
    /// Performs the operation after [`Schedule::heal`] has removed all rules.
    Stall,
}

impl MediumFault {
    /// The error that an operation returns if this fault makes it fail.
    #[must_use]
    pub fn error(self) -> io::Error {
        let code = match self {
            Self::NoSpace => rustix::io::Errno::NOSPC,
            Self::NoSystemFiles => rustix::io::Errno::NFILE,
            Self::NoProcessFiles => rustix::io::Errno::MFILE,
            Self::Io | Self::Short | Self::Torn | Self::Slow(_) | Self::Stall => {
                rustix::io::Errno::IO
            }
        };
        code.into()
    }
}

/// One rule of the schedule: which operations match, and which matches get the fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Matches only operations of this kind; `None` matches any operation.
    pub op: Option<Op>,
    /// Matches only paths that contain this string; an empty string matches any path.
    pub path: String,
    /// Number of the match at which the fault is injected, counted from 1 since the rule was added.
    pub nth: u64,
    /// Whether the fault is injected at every later match too.
    pub onward: bool,
    /// The injected fault.
    pub fault: MediumFault,
}

impl Rule {
    /// A rule for the `nth` operation (from 1) of any kind on any path.
    #[must_use]
    pub fn nth(nth: u64, fault: MediumFault) -> Self {
        Self { op: None, path: String::new(), nth, onward: false, fault }
    }

    /// A rule for every operation.
    #[must_use]
    pub fn always(fault: MediumFault) -> Self {
        Self::nth(1, fault).onward()
    }

    /// Restricts the rule to operations of this kind.
    #[must_use]
    pub fn on(mut self, op: Op) -> Self {
        self.op = Some(op);
        self
    }

    /// Restricts the rule to paths that contain `part`.
    #[must_use]
    pub fn at(mut self, part: impl Into<String>) -> Self {
        self.path = part.into();
        self
    }

    /// Extends the rule to all matches after the `nth`.
    #[must_use]
    pub fn onward(mut self) -> Self {
        self.onward = true;
        self
    }

    fn matches(&self, op: Op, path: &Path) -> bool {
        self.op.is_none_or(|only| only == op)
            && (self.path.is_empty() || path.to_string_lossy().contains(&self.path))
    }
}

/// Rules and counters, shared by all handles of a faulty medium and the test that drives it.
#[derive(Clone, Debug, Default)]
pub struct Schedule(Arc<Mutex<Script>>);

#[derive(Default)]
struct Script {
    /// Each rule with its number of matches.
    rules: Vec<(Rule, u64)>,
    /// An operation, a part of a path, and a function to run once, before the next such operation
    /// on a path that contains the part.
    hooks: Vec<(Op, String, Hook)>,
    counts: [u64; OPS],
    injected: u64,
}

type Hook = Box<dyn FnOnce() + Send>;

impl fmt::Debug for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Script")
            .field("rules", &self.rules)
            .field("hooks", &self.hooks.len())
            .field("injected", &self.injected)
            .finish_non_exhaustive()
    }
}

impl Schedule {
    /// A schedule without faults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a rule, which counts matches after this call. If several rules inject a fault into one
    /// operation, the fault of the oldest rule applies.
    pub fn add(&self, rule: Rule) {
        debug_assert!(rule.nth > 0, "matches are counted from 1");
        self.0.lock().rules.push((rule, 0));
    }

    /// Runs `hook` once, before the next operation `op` on a path that contains `part`. The hook
    /// may use the medium.
    pub fn before(&self, op: Op, part: impl Into<String>, hook: impl FnOnce() + Send + 'static) {
        self.0.lock().hooks.push((op, part.into(), Box::new(hook)));
    }

    /// Number of hooks that have not run.
    #[must_use]
    pub fn hooks(&self) -> usize {
        self.0.lock().hooks.len()
    }

    /// Removes all rules, so that no further fault is injected. Keeps the hooks and the counters.
    pub fn heal(&self) {
        self.0.lock().rules.clear();
    }

    /// Number of operations of one kind so far, including failed operations.
    #[must_use]
    pub fn count(&self, op: Op) -> u64 {
        self.0.lock().counts[op as usize]
    }

    /// Number of operations so far, including failed operations.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.lock().counts.iter().sum()
    }

    /// Number of injected faults so far.
    #[must_use]
    pub fn injected(&self) -> u64 {
        self.0.lock().injected
    }

    /// Runs the hooks that are due, counts an operation, and returns the fault to inject. A slow or
    /// stalled operation waits in this call, which then returns `None`.
    pub(crate) fn next(&self, op: Op, path: &Path) -> Option<MediumFault> {
        let due: Vec<_> = {
            let mut script = self.0.lock();
            let path = path.to_string_lossy();
            script
                .hooks
                .extract_if(.., |(at, part, _)| *at == op && path.contains(&**part))
                .collect()
        };
        due.into_iter().for_each(|(.., hook)| hook());
        match self.decide(op, path) {
            Some(MediumFault::Slow(pause)) => {
                std::thread::sleep(pause);
                None
            }
            Some(MediumFault::Stall) => {
                while !self.0.lock().rules.is_empty() {
                    std::thread::sleep(STALL_CHECK);
                }
                None
            }
            fault => fault,
        }
    }

    fn decide(&self, op: Op, path: &Path) -> Option<MediumFault> {
        let mut script = self.0.lock();
        script.counts[op as usize] += 1;
        let mut fault = None;
        for (rule, seen) in &mut script.rules {
            if rule.matches(op, path) {
                *seen += 1;
                if *seen == rule.nth || (rule.onward && *seen > rule.nth) {
                    fault = fault.or(Some(rule.fault));
                }
            }
        }
        script.injected += u64::from(fault.is_some());
        fault
    }
}
