//! `ritornello resize`, `paths` and `destroy`: the space of a store.

use crate::restore::{self, RestoreArgs};
use clap::{Args, Subcommand};
use ritornello_format::{Error, ErrorKind};
use ritornello_node::Node;
use ritornello_store::{CapacityChange, VolumeStats};
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::print::{bytes, json, print_stderr, print_stdout, table};
use ritornello_terminal::value::size;
use ritornello_terminal::{Context, open};
use serde::Serialize;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

/// Arguments of `resize`.
#[derive(Debug, Args)]
#[command(after_help = "\
The pages in the segments to be removed are moved to the segments that remain. If these lack space,
pages are evicted in the order of the store's eviction policy. Leased and retained pages, and pages
being written, may take at most 95 % of the new capacity. The command ends when the files are
removed; if it is interrupted, the store's owner continues, or the next owner if the command owned
the store.

Pass the new capacity to Store.open too, or no capacity: an owner resizes the store to the capacity
that it is given.

Examples:
  ritornello resize /nvme/kv 400GiB
  ritornello resize /nvme/kv 100GiB --json | jq .allocated_bytes")]
pub struct ResizeArgs {
    /// The store's directory
    pub dir: PathBuf,
    /// The store's new capacity
    #[arg(value_parser = size)]
    pub capacity: u64,
}

/// Arguments of `paths`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ritornello paths list /nvme/kv
  ritornello paths add /nvme/kv /nvme2/kv-segments
  ritornello paths drain /nvme/kv segments
  ritornello paths forget /nvme/kv /nvme3/dead-disk
  ritornello paths restore /nvme/kv /nvme2/kv-segments")]
pub struct PathsArgs {
    /// The operation.
    #[command(subcommand)]
    pub what: PathsCommand,
}

/// Operations on directories.
#[derive(Debug, Subcommand)]
pub enum PathsCommand {
    /// Show the directories and their segments
    #[command(after_help = "Examples:\n  ritornello paths list /nvme/kv --json")]
    List {
        /// The store's directory
        dir: PathBuf,
    },
    /// Add a directory; the capacity does not change, so resize the store as well
    #[command(after_help = "Examples:\n  ritornello paths add /nvme/kv /nvme2/kv-segments")]
    Add {
        /// The store's directory
        dir: PathBuf,
        /// The directory to add: new or empty, or a directory of this store that lost its file VOLUME
        path: PathBuf,
    },
    /// Remove a directory: its pages are moved or evicted, and its files removed
    #[command(after_help = "\
Leave the directory out of the list in the engines' setting `path` first: an opening adds listed
directories that the store lacks.

Examples:
  ritornello paths drain /nvme/kv /nvme2/kv-segments")]
    Drain {
        /// The store's directory
        dir: PathBuf,
        /// The directory to drain, as `paths list` shows it
        path: PathBuf,
    },
    /// Give up a directory that is lost, and its pages
    #[command(after_help = "\
A directory whose file system is not mounted is absent: its pages are misses until it is mounted
again, and no page is lost. Forget a directory whose disk is dead. Drain a directory that is
present.

Examples:
  ritornello paths list /nvme/kv
  ritornello paths forget /nvme/kv /nvme2/kv-segments")]
    Forget {
        /// The store's directory
        dir: PathBuf,
        /// The directory to give up, as `paths list` shows it
        path: PathBuf,
    },
    /// Restore a store whose own directory is lost, from its other directories
    Restore(RestoreArgs),
}

/// Arguments of `destroy`.
#[derive(Debug, Args)]
#[command(after_help = "\
Removes the files of the store in all its directories that are present, and its policy.toml; other
files stay. The command refuses to run while a process owns the store.

Examples:
  ritornello destroy /nvme/kv
  ritornello destroy /nvme/kv --yes")]
pub struct DestroyArgs {
    /// The store's directory
    pub dir: PathBuf,
    /// Skip the confirmation
    #[arg(long)]
    pub yes: bool,
}

#[derive(Serialize)]
struct Answer<'a> {
    dir: &'a Path,
    capacity_bytes: u64,
    allocated_bytes: u64,
    segments: u64,
    segments_max: u64,
    paths: &'a [VolumeStats],
}

/// Sets the capacity of a store.
///
/// # Errors
/// If the store cannot be opened, or refuses the capacity.
pub fn resize(context: &Context, args: &ResizeArgs) -> Result<Status, Failure> {
    change_capacity(context, &args.dir, &CapacityChange::Capacity(args.capacity))
}

/// Lists, adds, drains, gives up or restores directories of a store.
///
/// # Errors
/// If the store cannot be opened or restored, or the directory cannot be used.
pub fn paths(context: &Context, args: &PathsArgs) -> Result<Status, Failure> {
    match &args.what {
        PathsCommand::List { dir } => {
            let node = open::existing(dir)?;
            show(context, &node)?;
            node.close()?;
            Ok(Status::Fine)
        }
        PathsCommand::Add { dir, path } => {
            change_capacity(context, dir, &CapacityChange::AddVolume(absolute(path)?))
        }
        PathsCommand::Drain { dir, path } => {
            change_capacity(context, dir, &CapacityChange::DrainVolume(resolve_listed(dir, path)?))
        }
        PathsCommand::Forget { dir, path } => {
            change_capacity(context, dir, &CapacityChange::ForgetVolume(resolve_listed(dir, path)?))
        }
        PathsCommand::Restore(args) => restore::run(context, args),
    }
}

/// Returns the name under which the store in `dir` lists the directory `path` (see `paths list`),
/// or the absolute path if the store does not list it.
fn resolve_listed(dir: &Path, path: &Path) -> Result<String, Failure> {
    let manifest = open::manifest(dir)?;
    let listed = path.to_str().filter(|given| {
        let volumes = manifest.iter().flat_map(|manifest| &manifest.volumes);
        volumes.into_iter().any(|volume| volume.dir == **given)
    });
    listed.map_or_else(|| absolute(path), |listed| Ok(listed.to_owned()))
}

/// Destroys a store. Without `--yes`, asks for a confirmation on the terminal, and refuses if
/// standard input is not a terminal.
///
/// # Errors
/// If no store exists, a process owns it, the confirmation was refused, or a file cannot be
/// removed.
pub fn destroy(context: &Context, args: &DestroyArgs) -> Result<Status, Failure> {
    if open::manifest(&args.dir)?.is_none() {
        return Err(Failure::unusable(
            format!("there is no Ritornello store in {}", args.dir.display()),
            "name the directory that was given to Store.open",
        ));
    }
    if !args.yes && !is_confirmed(&args.dir)? {
        return Err(Failure::unusable("nothing was removed", "--yes to confirm"));
    }
    ritornello_node::destroy(&args.dir)?;
    if context.json {
        json(&serde_json::json!({ "dir": args.dir, "destroyed": true }));
    } else {
        print_stdout(&format!("the store in {} is removed", args.dir.display()));
    }
    Ok(Status::Fine)
}

fn is_confirmed(dir: &Path) -> Result<bool, Failure> {
    if !std::io::stdin().is_terminal() {
        return Ok(false);
    }
    let mut err = std::io::stderr().lock();
    let _ = write!(err, "Remove the store in {} and all its pages? Type yes: ", dir.display());
    let _ = err.flush();
    drop(err);
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(answer.trim() == "yes")
}

fn change_capacity(
    context: &Context,
    dir: &Path,
    change: &CapacityChange,
) -> Result<Status, Failure> {
    let node = open::existing(dir)?;
    // A change may take longer than a call's deadline; each further call continues the change.
    while let Err(error) = node.store().change_capacity(change) {
        if !is_in_progress(&error) {
            return Err(error.into());
        }
        print_stderr(&error.to_string());
    }
    show(context, &node)?;
    node.close()?;
    Ok(Status::Fine)
}

fn is_in_progress(error: &Error) -> bool {
    error.kind() == ErrorKind::Retry && error.to_string().contains("segments_to_go")
}

fn absolute(path: &Path) -> Result<String, Failure> {
    let path = std::path::absolute(path)?;
    path.to_str()
        .map(str::to_owned)
        .ok_or_else(|| Failure::unusable("the path is not UTF-8", "a path in UTF-8"))
}

fn show(context: &Context, node: &Node) -> Result<(), Failure> {
    let stats = node.store().stats()?.catalog;
    if context.json {
        json(&Answer {
            dir: node.path(),
            capacity_bytes: stats.capacity_bytes,
            allocated_bytes: stats.allocated_bytes,
            segments: stats.segments,
            segments_max: stats.segments_max,
            paths: &stats.paths,
        });
        return Ok(());
    }
    let mut rows = table(&["directory", "segments", "in use", ""]);
    for path in &stats.paths {
        rows.add_row([
            path.dir.clone(),
            path.segments.to_string(),
            bytes(path.used_bytes),
            match &path.absent {
                Some(why) => format!("absent: {why}"),
                None if path.draining => "draining".to_owned(),
                None => String::new(),
            },
        ]);
    }
    print_stdout(&format!(
        "{} of {} allocated, {} of {} segments\n{rows}",
        bytes(stats.allocated_bytes),
        bytes(stats.capacity_bytes),
        stats.segments,
        stats.segments_max
    ));
    Ok(())
}
