//! Limits of the kernel and the container for this process.

use super::finding::Finding;
use ritornello_store::{ControlGroup, control_group};
use ritornello_terminal::print::bytes;
use ritornello_volume::OTHER_FILES;
use rustix::process::{Resource, getrlimit};

/// Free memory, in bytes, that a control group should leave for the staging memory of one process
/// and for the index.
const MEMORY_WANTED: u64 = 1 << 30;

/// Examines the limits, for a store of `segments` segments.
pub fn examine(segments: u64) -> Vec<Finding> {
    vec![open_files(segments), locked_memory(), io_uring(), memory()]
}

/// Compares the process's hard limit of open files with the number that the store may need. The
/// soft limit does not matter, because opening a store raises it as needed, up to the hard limit.
fn open_files(segments: u64) -> Finding {
    const WHAT: &str = "open files";
    let limit = getrlimit(Resource::Nofile);
    let needed = segments + OTHER_FILES;
    let Some(most) = limit.maximum else {
        return Finding::fine(WHAT, "unlimited");
    };
    let found = format!("{most} at most; this store may need {needed}");
    if most >= needed {
        return Finding::fine(WHAT, found);
    }
    Finding::advice(
        WHAT,
        found,
        format!("as root: raise the hard limit (LimitNOFILE=, limits.conf) to {needed}"),
    )
}

fn locked_memory() -> Finding {
    let shown = match getrlimit(Resource::Memlock).current {
        None => "unlimited".to_owned(),
        Some(limit) => bytes(limit),
    };
    Finding::fine("locked memory", format!("{shown} (only our own copies to GPUs lock memory)"))
}

fn io_uring() -> Finding {
    const WHAT: &str = "io_uring";
    let switch = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
    match switch.as_deref().map(str::trim) {
        Ok("2") => Finding::advice(WHAT, "switched off", "sysctl kernel.io_uring_disabled=0"),
        Ok("1") => Finding::advice(
            WHAT,
            "for privileged processes only",
            "sysctl kernel.io_uring_disabled=0, or a separate group (kernel.io_uring_group)",
        ),
        Ok(_) => Finding::fine(WHAT, "allowed by the kernel (a container may still forbid it)"),
        Err(_) => {
            Finding::fine(WHAT, "allowed, as far as known: kernel.io_uring_disabled cannot be read")
        }
    }
}

fn memory() -> Finding {
    const WHAT: &str = "memory";
    let Some(ControlGroup { limit, used, .. }) = control_group() else {
        return Finding::fine(WHAT, "no limit of a control group");
    };
    let found = format!("{} used of {} in this control group", bytes(used), bytes(limit));
    if limit.saturating_sub(used) >= MEMORY_WANTED {
        Finding::fine(WHAT, found)
    } else {
        let change = format!("leave {} free for staging and the index", bytes(MEMORY_WANTED));
        Finding::advice(WHAT, found, change)
    }
}
