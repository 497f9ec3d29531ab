//! Validates the index against the segments that exist: part of recovery, after `open.rs` has
//! read the store's files and opened the index.

use crate::core::absence::Absence;
use crate::core::residents::{Residents, resident};
use crate::core::scopes::Scopes;
use crate::eviction::Resident;
use ritornello_format::{Extent, Manifest, PageHash, ScopeSlot, SegmentId, UNIT, units_of};
use ritornello_index::{PrefixIndex, RunId, RunView};
use ritornello_volume::segments::Segments;
use ritornello_volume::space::Space;
use std::collections::{BTreeMap, HashSet};

/// A run that passed validation.
pub(crate) struct RecoveredRun {
    pub(crate) scope: ScopeSlot,
    pub(crate) resident: Resident,
    pub(crate) recency: u64,
    pages: u64,
    units: u64,
    generation: u64,
    retain_until: u64,
}

/// Adds the segments of all present volumes to `space`. A segment that cannot be opened is absent:
/// its pages are misses, not lost. Returns the segments that can be opened.
pub(crate) fn find_segments(
    segments: &Segments,
    space: &mut Space,
    manifest: &Manifest,
    is_present: &dyn Fn(u8) -> bool,
    absence: &mut Absence,
    dropped: &mut BTreeMap<String, u64>,
) -> Vec<SegmentId> {
    let mut usable = Vec::new();
    for (number, volume) in (0..=u8::MAX).zip(&manifest.volumes) {
        if volume.is_retired() || absence.why(number).is_some() {
            continue;
        }
        let listed = segments.list_durably(number).map_err(|error| error.to_string());
        let listed = match listed {
            // Ask only after the listing whether the volume is present: if the disk was unmounted
            // before the listing, the empty mount point was listed.
            Ok(_) if !is_present(number) => {
                Err("the volume became absent during the opening".to_owned())
            }
            listed => listed,
        };
        let listed = match listed {
            Ok(listed) => listed,
            Err(why) => {
                tracing::warn!(dir = volume.dir, why, "a volume is absent: its pages are misses");
                absence.add_volume(number, why);
                continue;
            }
        };
        for id in listed {
            match segments.restore_length(id) {
                Ok(false) => {}
                Ok(true) => *dropped.entry("segments_cut_short".to_owned()).or_default() += 1,
                Err(error) => {
                    let segment = id.number();
                    tracing::warn!(%error, segment, "a segment is absent: its pages are misses");
                    absence.add_segment(id, error.to_string());
                    continue;
                }
            }
            if let Err(error) = space.add_segment(id) {
                tracing::warn!(
                    %error,
                    "a segment file could not be added to the space: it is not used"
                );
            }
            usable.push(id);
        }
    }
    usable
}

/// Marks the extents of valid runs in present segments as in use, and removes invalid runs from the
/// index. Returns the valid runs, and which of them have extents in absent space: the index keeps
/// these runs, but lookups skip them.
pub(crate) fn validate_runs(
    index: &dyn PrefixIndex,
    scopes: &Scopes,
    space: &mut Space,
    manifest: &Manifest,
    absence: &mut Absence,
    dropped: &mut BTreeMap<String, u64>,
) -> (Vec<RecoveredRun>, HashSet<RunId>) {
    let mut hidden = HashSet::new();
    let mut kept: Vec<RecoveredRun> = Vec::new();
    let mut rejected: Vec<(RunId, &'static str)> = Vec::new();
    let segment_units = (manifest.segment_bytes / UNIT) as u32;
    // Collect the rejected runs, because the index cannot change while it is visited.
    index.for_each(&mut |run, view| match rejection(&view, scopes, segment_units) {
        Some(reason) => rejected.push((run, reason)),
        None => {
            let extents: Vec<Extent> = view.live_extents();
            let is_hidden = absence.hides(&extents);
            let here = extents.iter().copied().filter(|e| !absence.covers(e.segment));
            // `mark` fails if an extent is outside the segments, or belongs to a run visited
            // before.
            if space.mark(&here.collect::<Vec<_>>()).is_err() {
                rejected.push((run, "space"));
                return;
            }
            if is_hidden {
                absence.note(&extents);
                hidden.insert(run);
            }
            let resident = resident(run, view.parent, &view.pages, &view.place);
            kept.push(RecoveredRun {
                scope: view.scope,
                resident,
                recency: view.recency,
                pages: view.pages.iter().filter(|page| **page != PageHash::NONE).count() as u64,
                units: extents.iter().map(|extent| u64::from(extent.units)).sum(),
                generation: view.place.generation,
                retain_until: view.retain_until,
            });
        }
    });
    // Removing a rejected run from the index also removes the runs that follow it. If such a run is
    // in `kept`, its space was marked as in use, and is freed here.
    let believed: HashSet<RunId> = kept.iter().map(|kept| kept.resident.run).collect();
    let mut gone = HashSet::new();
    for (run, reason) in rejected {
        let removed = index.truncate(run, 0);
        *dropped.entry(reason.to_owned()).or_default() +=
            removed.iter().map(|r| u64::from(r.pages)).sum::<u64>();
        for lost in removed {
            gone.insert(lost.run);
            if believed.contains(&lost.run) {
                // The run's extents in present segments were marked above, so freeing them cannot
                // fail.
                let here = lost.extents.into_iter().filter(|e| !absence.covers(e.segment));
                let _ = space.free(&here.collect::<Vec<_>>());
            }
        }
    }
    kept.retain(|kept| !gone.contains(&kept.resident.run));
    hidden.retain(|run| !gone.contains(run));
    (kept, hidden)
}

/// Returns the reason why a run is invalid, or `None`.
fn rejection(view: &RunView, scopes: &Scopes, segment_units: u32) -> Option<&'static str> {
    let Some(scope) = scopes.by_slot(view.scope) else { return Some("dropped_scope") };
    let metadata_only = view.place.extents.is_empty();
    let adds_up = (1..=units_of(scope.page_bytes)).contains(&u64::from(view.place.page_units))
        && view.place.check(view.pages.len() as u32, segment_units).is_ok();
    if metadata_only || adds_up { None } else { Some("place") }
}

pub(super) fn restore(residents: &mut Residents, mut kept: Vec<RecoveredRun>) {
    // Adding a run counts as a use of it, so add the least recently used run first.
    kept.sort_by_key(|kept| kept.recency);
    for kept in &kept {
        residents.admit(kept.scope, &kept.resident, kept.pages, kept.units);
    }
    // Retain the runs in the order of their puts. Of runs whose retentions end at the same time,
    // the run retained last is released first. A run is therefore released before its ancestors,
    // unless it was put before them.
    kept.retain(|kept| kept.retain_until > 0);
    kept.sort_by_key(|kept| kept.generation);
    for kept in kept {
        let retention = &mut residents.retention;
        retention.restore(kept.resident.run, kept.scope, kept.units, kept.retain_until);
    }
}
