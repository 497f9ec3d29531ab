//! `ritornello resize`, `paths` and `destroy`: a store's space, from outside.

use crate::args::{DestroyArgs, PathsArgs, PathsCommand, ResizeArgs};
use crate::exit::{Failure, Status};
use crate::print::{bytes, complain, json, say, table};
use crate::{Context, open};
use ritornello_format::{Error, ErrorKind};
use ritornello_node::Node;
use ritornello_store::{CapacityChange, PathStats};
use serde::Serialize;
use std::io::{IsTerminal, Write};
use std::path::Path;

#[derive(Serialize)]
struct Answer<'a> {
    dir: &'a Path,
    capacity_bytes: u64,
    allocated_bytes: u64,
    segments: u64,
    segments_max: u64,
    paths: &'a [PathStats],
}

/// Sets the capacity.
///
/// # Errors
/// Where the store cannot be opened, or the capacity cannot be.
pub fn resize(context: &Context, args: &ResizeArgs) -> Result<Status, Failure> {
    reshape(context, &args.dir, &CapacityChange::Capacity(args.capacity))
}

/// Lists, adds, drains or gives up directories.
///
/// # Errors
/// Where the store cannot be opened, or the directory cannot be used.
pub fn paths(context: &Context, args: &PathsArgs) -> Result<Status, Failure> {
    match &args.what {
        PathsCommand::List { dir } => {
            let node = open::existing(dir)?;
            show(context, &node)?;
            node.close()?;
            Ok(Status::Fine)
        }
        PathsCommand::Add { dir, path } => {
            reshape(context, dir, &CapacityChange::AddPath(absolute(path)?))
        }
        PathsCommand::Drain { dir, path } => {
            reshape(context, dir, &CapacityChange::DrainPath(listed(dir, path)?))
        }
        PathsCommand::Forget { dir, path } => {
            reshape(context, dir, &CapacityChange::ForgetPath(listed(dir, path)?))
        }
    }
}

/// A directory of the store in `dir`, as `paths list` shows it, or as it is reached from here.
fn listed(dir: &Path, path: &Path) -> Result<String, Failure> {
    let manifest = open::manifest(dir)?;
    let listed = path.to_str().filter(|given| {
        let volumes = manifest.iter().flat_map(|manifest| &manifest.volumes);
        volumes.into_iter().any(|volume| volume.dir == **given)
    });
    listed.map_or_else(|| absolute(path), |listed| Ok(listed.to_owned()))
}

/// Removes a store, after a question where somebody can answer it.
///
/// # Errors
/// Where there is none, somebody owns it, or nobody agreed.
pub fn destroy(context: &Context, args: &DestroyArgs) -> Result<Status, Failure> {
    if open::manifest(&args.dir)?.is_none() {
        return Err(Failure::unusable(
            format!("there is no Ritornello store in {}", args.dir.display()),
            "name the directory that was given to Store.open",
        ));
    }
    if !args.yes && !agreed(&args.dir)? {
        return Err(Failure::unusable("nothing was removed", "--yes, if you mean it"));
    }
    ritornello_node::destroy(&args.dir)?;
    if context.json {
        json(&serde_json::json!({ "dir": args.dir, "destroyed": true }));
    } else {
        say(&format!("the store in {} is gone", args.dir.display()));
    }
    Ok(Status::Fine)
}

fn agreed(dir: &Path) -> Result<bool, Failure> {
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

fn reshape(context: &Context, dir: &Path, change: &CapacityChange) -> Result<Status, Failure> {
    let node = open::existing(dir)?;
    // What takes longer than a call may is asked for again: it has come further by then.
    while let Err(error) = node.store().change_capacity(change) {
        if !goes_on(&error) {
            return Err(error.into());
        }
        complain(&error.to_string());
    }
    show(context, &node)?;
    node.close()?;
    Ok(Status::Fine)
}

fn goes_on(error: &Error) -> bool {
    error.kind() == ErrorKind::Retry && error.to_string().contains("segments_to_go")
}

fn absolute(path: &Path) -> Result<String, Failure> {
    let path = std::path::absolute(path)?;
    path.to_str()
        .map(str::to_owned)
        .ok_or_else(|| Failure::unusable("the path is not UTF-8", "another name"))
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
            match &path.away {
                Some(why) => format!("away: {why}"),
                None if path.draining => "draining".to_owned(),
                None => String::new(),
            },
        ]);
    }
    say(&format!(
        "{} of {} allocated, {} of {} segments\n{rows}",
        bytes(stats.allocated_bytes),
        bytes(stats.capacity_bytes),
        stats.segments,
        stats.segments_max
    ));
    Ok(())
}
