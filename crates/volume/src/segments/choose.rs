//! Chooses the I/O engine from the requested mode, the capabilities of the directories, and the
//! permissions of the kernel.

use super::huge;
use super::kind::Trust;
use super::report::{IoChoice, IoMode, IoReport};
use super::selftest::{DirectoryTest, examine};
use super::volumes::Volume;
use crate::io_engine::{Inline, IoEngine, Pool, Uring};
use crate::staging::Backing;
use ritornello_format::{Error, Result};
use ritornello_medium::Medium;
use std::collections::BTreeMap;
use std::path::PathBuf;

pub(super) struct Choice {
    pub(super) engine: Box<dyn IoEngine>,
    /// For each directory, in the given order, its volume, or why it cannot be used.
    pub(super) volumes: Vec<Result<Volume>>,
    pub(super) report: IoReport,
}

pub(super) fn choose(
    medium: &dyn Medium,
    dirs: &[PathBuf],
    chosen: IoChoice,
    backing: Backing,
) -> Result<Choice> {
    let (mut tests, mut usable, mut unusable) = (Vec::new(), Vec::new(), BTreeMap::new());
    for (at, dir) in dirs.iter().enumerate() {
        match examine(medium, dir) {
            Ok(test) => {
                tests.push(test);
                usable.push(dir);
            }
            Err(error) => drop(unusable.insert(at, error)),
        }
    }
    // One usable directory is enough. Without a usable directory, report why the first failed.
    if tests.is_empty()
        && let Some((_, error)) = unusable.pop_first()
    {
        return Err(error);
    }
    let mut warnings = Vec::new();
    let mut distrust = String::new();
    let descriptors = tests.iter().all(|test| test.descriptors);
    // If all volumes are absent, no directory was tested and the file systems are unknown: do not
    // map.
    let mapped = chosen == IoChoice::Auto
        && descriptors
        && !tests.is_empty()
        && tests.iter().all(DirectoryTest::in_memory);
    for (dir, test) in usable.iter().zip(&tests) {
        let (dir, kind) = (dir.display(), &test.kind);
        if test.in_memory() && !mapped {
            warnings.push(format!(
                "{dir} ({kind}) is in memory but not mapped, so system calls move its bytes, which \
                 takes several times the CPU time: make a separate store there, with io=auto"
            ));
        } else if test.real && !test.direct && !mapped && chosen != IoChoice::Buffered {
            warnings.push(format!(
                "{dir} ({kind}) is read and written through the page cache, which takes several \
                 times the CPU time of direct I/O: {}; put the store on ext4 or XFS",
                test.why
            ));
        }
        match test.trust {
            Trust::Foreign if distrust.is_empty() => {
                distrust = format!(
                    "{dir} is on {kind}, which another machine or process serves: this machine cannot \
                     guarantee locks and durability there; put the store on a local disk"
                );
            }
            Trust::Unknown => warnings.push(format!(
                "{dir} is on an unknown file system, whose locks and durability are not known"
            )),
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

    let undrained = tests.iter().find(|test| test.direct && !test.drains).map(|f| f.kind.clone());
    let real = tests.iter().all(|test| test.real);
    let mut direct: Vec<bool> =
        tests.iter().map(|test| test.direct && chosen != IoChoice::Buffered).collect();
    let some_direct = direct.contains(&true);
    let (engine, mode, why): (Box<dyn IoEngine>, _, _) = match chosen {
        _ if !real && chosen != IoChoice::Pool => {
            direct.fill(false);
            (Box::new(Inline), IoMode::Simulated, "the files are simulated".to_owned())
        }
        IoChoice::Auto if mapped => {
            let why = usable.iter().find_map(|dir| huge::why_unavailable(medium, dir));
            let why = why.unwrap_or_default();
            (Box::new(Inline), IoMode::Mapped, why)
        }
        IoChoice::Buffered => (pool(), IoMode::Buffered, "requested".to_owned()),
        IoChoice::Auto if !some_direct => {
            let why = tests.first().map(|test| test.why.clone());
            (pool(), IoMode::Buffered, why.unwrap_or_default())
        }
        IoChoice::Pool => (pool(), IoMode::Pool, "requested".to_owned()),
        IoChoice::Auto if !descriptors => {
            (pool(), IoMode::Pool, "the files have no descriptors".to_owned())
        }
        IoChoice::Uring if !descriptors => {
            return Err(Error::invalid(
                "io_uring is requested and the files have no descriptors: choose io=auto",
            ));
        }
        _ if undrained.is_some() => {
            let why = format!(
                "{} is not known to wait for a killed process's io_uring writes",
                undrained.unwrap_or_default()
            );
            if chosen == IoChoice::Uring {
                return Err(Error::invalid(format!(
                    "io_uring is requested and {why}: choose io=auto, or put the store on ext4 \
                     or XFS"
                )));
            }
            warnings
                .push(format!("{why}, so threads move the bytes; put the store on ext4 or XFS"));
            (pool(), IoMode::Pool, why)
        }
        IoChoice::Auto | IoChoice::Uring => match Uring::new() {
            Ok(engine) => (Box::new(engine), IoMode::Uring, String::new()),
            Err(error) if chosen == IoChoice::Uring => {
                return Err(Error::invalid(
                    "io_uring is requested and is forbidden or unknown here: allow it (seccomp, \
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
    let mut found = usable.iter().zip(&tests).zip(&direct).map(|((dir, test), direct)| Volume {
        dir: (*dir).clone(),
        direct: *direct,
        in_memory: test.in_memory(),
        drains: test.drains,
        file_system: test.kind.clone(),
    });
    let volume = |at| match unusable.remove(&at) {
        Some(error) => Err(error),
        None => Ok(found.next().unwrap_or_default()),
    };
    let volumes = (0..dirs.len()).map(volume).collect();
    let report = IoReport {
        mode,
        why,
        file_systems: tests.into_iter().map(|test| test.kind).collect(),
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
