//! `ritornello stat`.

use crate::Context;
use crate::args::StatArgs;
use crate::exit::{Failure, Status};
use crate::print::{bytes, count, json, say, table};
use crate::{open, print};
use ritornello_store::StoreStats;
use serde::Serialize;
use std::path::Path;

#[derive(Serialize)]
struct Answer<'a> {
    dir: &'a Path,
    /// What this command was to the store: `owner` for a moment, or `client` of the process that is.
    role: &'a str,
    #[serde(flatten)]
    stats: &'a StoreStats,
}

/// Shows what a store holds and how it is doing.
///
/// # Errors
/// Where it cannot be opened.
pub fn run(context: &Context, args: &StatArgs) -> Result<Status, Failure> {
    let node = open::existing(&args.dir)?;
    let stats = node.store().stats()?;
    let role = node.role().word();
    if context.json {
        json(&Answer { dir: node.path(), role, stats: &stats });
    } else {
        say(&describe(node.path(), role, &stats));
    }
    node.close()?;
    Ok(Status::Fine)
}

fn describe(dir: &Path, role: &str, stats: &StoreStats) -> String {
    let s = &stats.catalog;
    let owner = match role {
        "client" => format!("process {}, {} clients", s.owner_pid, s.clients),
        _ => "nobody (opened for this)".to_owned(),
    };
    let mut out = print::table(&[]);
    let mut row = |name: &str, value: String| {
        out.add_row([name.to_owned(), value]);
    };
    row("store", format!("{}  {}", dir.display(), s.uuid));
    row("owned by", owner);
    row("pages", format!("{} in {} runs, {} scopes", count(s.pages), count(s.runs), s.scopes));
    row(
        "capacity",
        format!(
            "{} of {} allocated, {} in use",
            bytes(s.allocated_bytes),
            bytes(s.capacity_bytes),
            bytes(s.used_bytes)
        ),
    );
    row(
        "segments",
        format!(
            "{} of {} x {}, {} files",
            s.segments,
            s.segments_max,
            bytes(s.segment_bytes),
            s.files
        ),
    );
    row(
        "space",
        format!(
            "{} free, {} becoming free, {} leased, {} being written, {} quarantined",
            bytes(s.free_bytes),
            bytes(s.limbo_bytes),
            bytes(s.deferred_bytes),
            bytes(s.reserved_bytes),
            bytes(s.quarantined_bytes)
        ),
    );
    row(
        "index",
        format!(
            "{}: {} of memory, {} on disk",
            s.index,
            bytes(s.index_memory_bytes),
            bytes(s.index_disk_bytes)
        ),
    );
    row(
        "I/O",
        format!(
            "{}{}, {} pages, {}",
            s.io.mode,
            if s.io.direct { ", past the page cache" } else { ", through the page cache" },
            if s.io.huge_pages { "huge" } else { "small" },
            s.io.file_system
        ),
    );
    row("durability", s.durability.clone());
    row("opened in", format!("{:.1} ms, epoch {}", s.open_ms, s.epoch));
    for (reason, pages) in &s.dropped_at_open {
        row("dropped at open", format!("{}: {reason}", count(*pages)));
    }
    if let Some(cause) = &s.poisoned {
        row("POISONED", format!("{cause}: close the store, check the disk, open it again"));
    }
    for warning in &s.io.warnings {
        row("warning", warning.clone());
    }
    let counted: Vec<_> = s.counters.iter().filter(|(_, value)| **value > 0).collect();
    let mut text = out.to_string();
    if !counted.is_empty() {
        let mut counters = table(&["counted since open", ""]);
        for (name, value) in counted {
            counters.add_row([name.clone(), count(*value)]);
        }
        text = format!("{text}\n{counters}");
    }
    text
}
