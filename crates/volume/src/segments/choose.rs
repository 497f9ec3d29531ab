//! Chooses the engine from the request, the abilities of the directories, and what the kernel
//! permits.

use super::huge;
use super::kind::Trust;
use super::report::{IoChoice, IoMode, IoReport};
use super::selftest::{Finding, examine};
use super::volumes::Volume;
use crate::io_engine::{Inline, IoEngine, Pool, Uring};
use crate::staging::Backing;
use ritornello_format::{Error, Result};
use ritornello_medium::Medium;
use std::collections::BTreeMap;
use std::path::PathBuf;

pub(super) struct Choice {
    pub(super) engine: Box<dyn IoEngine>,
    /// Each directory in the given order, or why it cannot be used.
    pub(super) volumes: Vec<Result<Volume>>,
    pub(super) report: IoReport,
}

pub(super) fn choose(
    medium: &dyn Medium,
    dirs: &[PathBuf],
    asked: IoChoice,
    backing: Backing,
) -> Result<Choice> {
    let (mut findings, mut usable, mut refused) = (Vec::new(), Vec::new(), BTreeMap::new());
    for (at, dir) in dirs.iter().enumerate() {
        match examine(medium, dir) {
            Ok(finding) => {
                findings.push(finding);
                usable.push(dir);
            }
            Err(error) => drop(refused.insert(at, error)),
        }
    }
    // One usable directory is enough. With none, report why the first failed.
    if findings.is_empty()
        && let Some((_, error)) = refused.pop_first()
    {
        return Err(error);
    }
    let mut warnings = Vec::new();
    let mut distrust = String::new();
    // Do not map if all volumes are away: their file systems are unknown.
    let mapped =
        asked == IoChoice::Auto && !findings.is_empty() && findings.iter().all(Finding::in_memory);
    for (dir, finding) in usable.iter().zip(&findings) {
        let (dir, kind) = (dir.display(), &finding.kind);
        if finding.in_memory() && !mapped {
            warnings.push(format!(
                "{dir} ({kind}) is driven by system calls, several times the CPU: a store of its \
                 own, with io=auto, is mapped"
            ));
        } else if finding.real && !finding.direct && !mapped && asked != IoChoice::Buffered {
            warnings.push(format!(
                "{dir} ({kind}) is driven through the page cache, several times the CPU: {}; \
                 put the store on ext4 or XFS",
                finding.why
            ));
        }
        match finding.trust {
            Trust::Foreign if distrust.is_empty() => {
                distrust = format!(
                    "{dir} is on {kind}, which is served from elsewhere: locks and durability \
                     are not this machine's to promise; put the store on a local disk"
                );
            }
            Trust::Unknown => warnings.push(format!("{dir} is on an unknown file system")),
            _ => {}
        }
    }
    if !backing.is_huge() && !mapped {
        warnings.push(
            "staging has no huge pages, which halves the bandwidth of direct I/O: write madvise \
             to /sys/kernel/mm/transparent_hugepage/enabled"
                .to_owned(),
        );
    }

    let undrained =
        findings.iter().find(|finding| finding.direct && !finding.drains).map(|f| f.kind.clone());
    let real = findings.iter().all(|finding| finding.real);
    let mut direct: Vec<bool> =
        findings.iter().map(|finding| finding.direct && asked != IoChoice::Buffered).collect();
    let some_direct = direct.contains(&true);
    let (engine, mode, why): (Box<dyn IoEngine>, _, _) = match asked {
        _ if !real && asked != IoChoice::Pool => {
            direct.fill(false);
            (Box::new(Inline), IoMode::Simulated, "the files are simulated".to_owned())
        }
        IoChoice::Auto if mapped => {
            let why = usable.iter().find_map(|dir| huge::why_unavailable(dir)).unwrap_or_default();
            (Box::new(Inline), IoMode::Mapped, why)
        }
        IoChoice::Buffered => (pool(), IoMode::Buffered, "asked for".to_owned()),
        IoChoice::Auto if !some_direct => {
            let why = findings.first().map(|finding| finding.why.clone());
            (pool(), IoMode::Buffered, why.unwrap_or_default())
        }
        IoChoice::Pool => (pool(), IoMode::Pool, "asked for".to_owned()),
        _ if undrained.is_some() => {
            let why = format!(
                "{} is not known to wait for a killed process's io_uring writes",
                undrained.unwrap_or_default()
            );
            if asked == IoChoice::Uring {
                return Err(Error::invalid(format!(
                    "io_uring was asked for and {why}: choose io=auto, or put the store on ext4 \
                     or XFS"
                )));
            }
            warnings
                .push(format!("{why}, so threads move the bytes; put the store on ext4 or XFS"));
            (pool(), IoMode::Pool, why)
        }
        IoChoice::Auto | IoChoice::Uring => match Uring::new() {
            Ok(engine) => (Box::new(engine), IoMode::Uring, String::new()),
            Err(error) if asked == IoChoice::Uring => {
                return Err(Error::invalid(
                    "io_uring was asked for and is forbidden or unknown here: allow it (seccomp, \
                     kernel.io_uring_disabled), or choose io=auto",
                )
                .because(error));
            }
            Err(error) => {
                let why = format!("io_uring cannot be used: {error}");
                warnings.push(format!("{why}; allow it (seccomp, kernel.io_uring_disabled)"));
                (pool(), IoMode::Pool, why)
            }
        },
    };
    let mut found =
        usable.iter().zip(&findings).zip(&direct).map(|((dir, finding), direct)| Volume {
            dir: (*dir).clone(),
            direct: *direct,
            in_memory: finding.in_memory(),
            drains: finding.drains,
        });
    let volume = |at| match refused.remove(&at) {
        Some(error) => Err(error),
        None => Ok(found.next().unwrap_or_default()),
    };
    let volumes = (0..dirs.len()).map(volume).collect();
    let report = IoReport {
        mode,
        why,
        file_systems: findings.into_iter().map(|finding| finding.kind).collect(),
        direct: !direct.contains(&false),
        backing,
        trusted: distrust.is_empty(),
        distrust,
        warnings,
    };
    tracing::info!(
        mode = report.mode.word(),
        why = report.why,
        direct = report.direct,
        file_systems = ?report.file_systems,
        staging = report.backing.word(),
        trusted = report.trusted,
        "segments opened"
    );
    for warning in report.warnings.iter().chain((!report.trusted).then_some(&report.distrust)) {
        tracing::warn!("{warning}");
    }
    Ok(Choice { engine, volumes, report })
}

fn pool() -> Box<dyn IoEngine> {
    Box::new(Pool::new())
}
