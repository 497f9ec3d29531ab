//! `ritornello stat` of a store that no process owns.

use ritornello_store::StoredStats;
use ritornello_terminal::Context;
use ritornello_terminal::exit::Status;
use ritornello_terminal::print::{bytes, count, json, print_stdout, table};
use serde::Serialize;
use std::path::Path;

#[derive(Serialize)]
struct Answer<'a> {
    dir: &'a Path,
    /// Always null: no process owns the store.
    owner_pid: Option<u32>,
    #[serde(flatten)]
    stored: &'a StoredStats,
}

/// Prints `stored`, the state of the unowned store in `dir` as read from its files. `is_priced`: the
/// caller asks for the price of savings; only an owner knows the savings.
pub(super) fn show(context: &Context, dir: &Path, stored: &StoredStats, is_priced: bool) -> Status {
    if context.json {
        json(&Answer { dir, owner_pid: None, stored });
    } else {
        print_stdout(&describe(dir, stored, is_priced));
    }
    let is_degraded = stored.paths.iter().any(|path| path.absent.is_some());
    if is_degraded || !stored.problems.is_empty() { Status::Problems } else { Status::Fine }
}

fn describe(dir: &Path, stored: &StoredStats, is_priced: bool) -> String {
    let mut out = table(&[]);
    let mut row = |name: &str, value: String| {
        out.add_row([name.to_owned(), value]);
    };
    row("store", format!("{}  {}", dir.display(), stored.uuid));
    row("owned by", "no process owns this store; read from its manifest and checkpoint".to_owned());
    row("last owner", last_owner(stored));
    row("pages", pages(stored));
    row("capacity", bytes(stored.capacity_bytes));
    row("segments", format!("{} x {}", stored.segments, bytes(stored.segment_bytes)));
    for path in stored.paths.iter().filter(|path| stored.paths.len() > 1 || path.draining) {
        let draining = if path.draining { ", draining" } else { "" };
        row("path", format!("{}: {} segments{draining}", path.dir, path.segments));
    }
    row("index", stored.index.clone());
    row("scopes", stored.scopes.map_or_else(|| "unknown".to_owned(), count));
    if is_priced {
        row("savings", "unknown without an owner".to_owned());
    }
    for path in &stored.paths {
        if let Some(why) = &path.absent {
            row("DEGRADED", format!("{}: {why}", path.dir));
        }
    }
    for problem in &stored.problems {
        row("problem", problem.clone());
    }
    let mut text = out.to_string();
    if !stored.first_scopes.is_empty() {
        let mut scopes = table(&["scope", "model", "quota"]);
        for scope in &stored.first_scopes {
            scopes.add_row([
                scope.id.chars().take(8).collect(),
                scope.model.chars().take(32).collect(),
                scope.quota_bytes.map_or_else(|| "none".to_owned(), bytes),
            ]);
        }
        text = format!("{text}\n{scopes}");
    }
    text
}

fn last_owner(stored: &StoredStats) -> String {
    let StoredStats { last_owner, owner_epoch, .. } = stored;
    match (owner_epoch, stored.clean) {
        (0, _) => "none: the creation or restore of the store has not ended".to_owned(),
        (_, true) => format!("{last_owner}, epoch {owner_epoch}, closed the store"),
        (_, false) => format!(
            "{last_owner}, epoch {owner_epoch}, ended without closing the store: the next owner \
             recovers it"
        ),
    }
}

/// Formats the number of pages in the last checkpoint, and the bytes of journal records after the
/// checkpoint, which the number does not reflect.
fn pages(stored: &StoredStats) -> String {
    let Some(journal) = stored.journal_bytes else {
        return "unknown without an owner".to_owned();
    };
    match stored.checkpoint {
        Some(found) => {
            let counted = format!("{} in {} runs", count(found.pages), count(found.runs));
            if journal == 0 {
                return counted;
            }
            format!("{counted} at the last checkpoint; {} of changes after it", bytes(journal))
        }
        None if journal == 0 => "none".to_owned(),
        None => format!("unknown: no checkpoint yet, {} of changes", bytes(journal)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_store::StoredCheckpoint;

    fn stored() -> StoredStats {
        StoredStats {
            uuid: "07".repeat(16),
            owner_epoch: 3,
            clean: true,
            last_owner: "host boot pid 4711".into(),
            index: "run".into(),
            capacity_bytes: 16 << 20,
            segment_bytes: 1 << 20,
            segments: 2,
            paths: Vec::new(),
            scopes: Some(1),
            first_scopes: Vec::new(),
            checkpoint: Some(StoredCheckpoint { runs: 3, pages: 24 }),
            journal_bytes: Some(0),
            problems: Vec::new(),
            unopenable: None,
        }
    }

    #[test]
    fn page_count_names_changes_after_the_checkpoint() {
        let mut stored = stored();
        assert_eq!(pages(&stored), "24 in 3 runs");
        stored.journal_bytes = Some(2048);
        assert_eq!(
            pages(&stored),
            "24 in 3 runs at the last checkpoint; 2 KiB of changes after it"
        );
        stored.checkpoint = None;
        assert_eq!(pages(&stored), "unknown: no checkpoint yet, 2 KiB of changes");
        stored.journal_bytes = Some(0);
        assert_eq!(pages(&stored), "none");
        stored.journal_bytes = None;
        assert_eq!(pages(&stored), "unknown without an owner");
    }

    #[test]
    fn last_owner_row_says_how_the_owner_ended() {
        let mut stored = stored();
        assert!(last_owner(&stored).ends_with("pid 4711, epoch 3, closed the store"));
        stored.clean = false;
        assert!(last_owner(&stored).contains("the next owner recovers it"));
        stored.owner_epoch = 0;
        assert!(last_owner(&stored).starts_with("none"));
    }
}
