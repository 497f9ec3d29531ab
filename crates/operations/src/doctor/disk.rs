//! Findings about the file systems, the I/O mode and the free space of a store.

use super::finding::Finding;
use ritornello_format::Manifest;
use ritornello_medium::{Host, Medium};
use ritornello_store::{Budget, SEGMENT_BYTES, check_memory};
use ritornello_terminal::print::bytes;
use ritornello_volume::segments::{IoChoice, IoMode, IoReport, Segments, SegmentsConfig};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Returns the maximum number of segment files of the store; zero if the capacity is unknown or
/// invalid.
pub fn segments(manifest: Option<&Manifest>, capacity: Option<u64>) -> u64 {
    let wanted = manifest
        .map(|manifest| (manifest.capacity, manifest.segment_bytes))
        .or(capacity.map(|capacity| (capacity, SEGMENT_BYTES)));
    wanted
        .and_then(|(capacity, segment)| Budget::divide(capacity, segment).ok())
        .map_or(0, |budget| u64::from(budget.segments_max))
}

/// Examines the directories of the store that `manifest` describes, or, without a manifest, the
/// directory `dir` for a store of `capacity` bytes.
pub fn examine(dir: &Path, manifest: Option<&Manifest>, capacity: Option<u64>) -> Vec<Finding> {
    let dirs: Vec<PathBuf> = match manifest {
        Some(manifest) => manifest.directories(dir),
        None => vec![dir.to_owned()],
    };
    let mut findings = Vec::new();
    if let Some(manifest) = manifest {
        findings.push(Finding::fine(
            "store",
            format!(
                "{} in segments of {}, last owned by {}",
                bytes(manifest.capacity),
                bytes(manifest.segment_bytes),
                if manifest.owner.is_empty() { "no process" } else { &manifest.owner }
            ),
        ));
    }
    let config = SegmentsConfig {
        dirs: dirs.clone(),
        segment_bytes: manifest.map_or(SEGMENT_BYTES, |manifest| manifest.segment_bytes),
        io: IoChoice::Auto,
        in_flight_bytes: 0,
    };
    match Segments::open(Arc::new(Host), config) {
        Ok(segments) => findings.extend(io(&segments.report())),
        Err(error) => findings.push(Finding::wrong(
            "I/O",
            error.to_string(),
            "name another directory, or correct the permissions of this directory",
        )),
    }
    for dir in &dirs {
        findings.push(room(dir, manifest, capacity));
    }
    findings
}

fn io(report: &IoReport) -> Vec<Finding> {
    let names = report.file_systems.join(", ");
    let mut findings = Vec::new();
    let mapped = report.mode == IoMode::Mapped;
    let in_memory = report.file_systems.iter().any(|name| ["tmpfs", "ramfs"].contains(&&**name));
    findings.push(if mapped {
        Finding::fine(
            "file system",
            format!("{names}: memory of a host tier, lost at the next boot"),
        )
    } else if report.trusted && in_memory {
        let found = format!("{names}: memory, lost at the next boot");
        Finding::advice("file system", found, "a directory on a disk")
    } else if report.trusted {
        Finding::fine("file system", format!("{names}, trusted"))
    } else {
        let found = format!("{names}, unreliable: {}", report.distrust);
        Finding::wrong("file system", found, "a directory on a local disk")
    });
    if mapped {
        findings.push(match &*report.why {
            "" => {
                Finding::fine("I/O", "copies from and to mapped memory; huge pages are available")
            }
            why => Finding::advice("I/O", "copies from and to mapped memory", why),
        });
        return findings;
    }
    let how = if report.direct { "past the page cache" } else { "through the page cache" };
    let found = format!("{}, {how}", report.mode.word());
    findings.push(match (report.mode, report.direct) {
        (IoMode::Uring, true) => Finding::fine("I/O", found),
        _ => {
            let change = if report.why.is_empty() {
                "a directory on ext4 or XFS, and a kernel and container that allow io_uring".into()
            } else {
                report.why.clone()
            };
            Finding::advice("I/O", found, change)
        }
    });
    findings.push(if report.backing.is_huge() {
        Finding::fine("huge pages", report.backing.word())
    } else {
        Finding::advice(
            "huge pages",
            "none: direct I/O runs at half its bandwidth",
            "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    });
    // Leave out warnings about huge pages and the page cache, because the findings `huge pages` and
    // `I/O` report them.
    let reported =
        |warning: &&String| !warning.contains("huge pages") && !warning.contains("page cache");
    findings.extend(
        report.warnings.iter().filter(reported).map(|w| Finding::advice("I/O", w.clone(), "")),
    );
    findings
}

/// Returns the finding about free space: whether the file system has the space that the store will
/// still allocate, and how much space the store leaves free.
fn room(dir: &Path, manifest: Option<&Manifest>, capacity: Option<u64>) -> Finding {
    const WHAT: &str = "free space";
    let room = match Host.room(dir) {
        Ok(room) => room,
        Err(error) => return Finding::wrong(WHAT, error.to_string(), "another directory"),
    };
    let floor = Budget::floor(room.total);
    let usable = room.available.saturating_sub(floor);
    let found = format!(
        "{} of {} free on {}; the store stops growing when {} are left",
        bytes(room.available),
        bytes(room.total),
        dir.display(),
        bytes(floor)
    );
    let (budget, taken) = match manifest {
        Some(manifest) => {
            let volumes = manifest.directories(dir).len().max(1) as u64;
            (Some(manifest.capacity / volumes), allocated(dir))
        }
        None => (capacity, 0),
    };
    if let (None, Some(capacity)) = (manifest, capacity)
        && let Err(error) = Budget::divide(capacity, SEGMENT_BYTES)
    {
        return Finding::wrong("capacity", error.to_string(), "a larger --capacity");
    }
    let more = budget.unwrap_or(0).saturating_sub(taken);
    if let Err(error) = check_memory(&room, more) {
        return match manifest {
            Some(_) => Finding::advice(WHAT, found, error.to_string()),
            None => Finding::wrong(WHAT, found, error.to_string()),
        };
    }
    match budget {
        Some(budget) if budget.saturating_sub(taken) > usable => {
            let missing = budget - taken - usable;
            let change = format!("free {}, or a smaller capacity", bytes(missing));
            match manifest {
                // An existing store works without the missing space, because it evicts pages
                // instead of growing.
                Some(_) => Finding::advice(WHAT, found, change),
                None => Finding::wrong(WHAT, found, change),
            }
        }
        _ if usable == 0 => Finding::wrong(WHAT, found, "free some space"),
        _ => Finding::fine(WHAT, found),
    }
}

fn allocated(dir: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let Ok(entries) = std::fs::read_dir(dir) else { return 0 };
    entries.flatten().filter_map(|entry| entry.metadata().ok()).map(|m| m.blocks() * 512).sum()
}
