//! Reattaching absent space that has returned, and giving up absent space that will not return.

use super::hidden::{Cause, Hidden};
use crate::core::StoreCore;
use crate::core::miss_causes::MissCause;
use crate::core::state::State;
use crate::directory::Directory;
use crate::volumes::VolumeState;
use ritornello_format::{Error, Extent, Manifest, Result, SegmentId, VolumeMarker};
use ritornello_index::{Removed, RunId, RunView};
use ritornello_volume::segments::Segments;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::{Duration, Instant};

/// Maximum time that [`StoreCore::reattach`] and [`StoreCore::end_search`] wait until another
/// change of the capacity or directories, and the creation of a segment, have ended.
const SHAPE_TIMEOUT: Duration = Duration::from_secs(10);

impl StoreCore {
    /// Whether any volume or segment is absent.
    pub(crate) fn is_degraded(&self) -> bool {
        !self.state.lock().absence.is_empty()
    }

    /// Checks absent volumes and segments, and reattaches returned volumes and segments: lookups
    /// find their runs again. Removes runs with an extent in a segment that no longer exists, or in
    /// space that another run or a reservation uses, and all runs after them.
    ///
    /// # Errors
    /// `Fatal` if a sync failed: the store is poisoned. `Retry` if the sync has not ended: it
    /// continues. `Closed` if the store is closed. Volumes and segments that cannot be reattached
    /// stay absent, with the reason, and cause no error.
    pub(crate) fn reattach_absent(&self) -> Result<()> {
        self.reattach(false)
    }

    /// Reattaches absent space. If `searching` is set, also reattaches the volumes whose segments
    /// `paths restore` has not searched for runs, because the volumes were absent. Until
    /// [`StoreCore::end_search`], no put gets space on such a volume, and the volume's segments are
    /// not removed. If another change of the capacity or directories, or the creation of a segment,
    /// does not end within [`SHAPE_TIMEOUT`], the space stays absent, without an error.
    ///
    /// # Errors
    /// Errors of [`StoreCore::reattach_absent`].
    pub(crate) fn reattach(&self, searching: bool) -> Result<()> {
        if !self.is_degraded() {
            return Ok(());
        }
        let mut volumes = self.attach_volumes(searching);
        let until = Instant::now() + SHAPE_TIMEOUT;
        let Some(change) = self.shape.change_by(until) else {
            return Ok(());
        };
        // Wait for a segment that is being created: if the maximum number of segments of its volume
        // shrank now, the allocator could refuse the segment, and its file would be orphaned.
        let Some(growing) = self.shape.pause_growth(until) else {
            return Ok(());
        };
        // Another caller may have reattached or retired a volume since `attach_volumes` listed it.
        volumes.retain(|(number, _)| self.state.lock().absence.why(*number).is_some());
        for (number, volume) in (0..=u8::MAX).zip(&self.shape.manifest().volumes) {
            if volume.is_retired() {
                self.segments.retire_volume(number);
            }
        }
        for (number, segments) in &volumes {
            let manifest = self.shape.manifest();
            let mut state = self.state.lock();
            if manifest.volumes.get(usize::from(*number)).is_some_and(|v| v.unsearched) {
                state.space.hold_unsearched(*number, true);
            }
            state.absence.list(*number, segments);
        }
        let (mut restored, mut vanished) = (Vec::new(), 0);
        let absent: Vec<SegmentId> = self.state.lock().absence.segments().collect();
        for id in absent {
            let (manifest, directory) = (self.shape.manifest(), self.shape.directory().clone());
            let exists =
                move |segments: &Segments| segment_exists(segments, &directory, &manifest, id);
            match self.on_volume(id.volume(), exists) {
                Ok(true) => restored.push(id),
                Ok(false) => {
                    self.state.lock().absence.segments.remove(&id);
                    vanished += 1;
                }
                Err(error) => {
                    if let Some(reason) = self.state.lock().absence.segments.get_mut(&id) {
                        *reason = error.to_string();
                    }
                }
            }
        }
        if volumes.is_empty() && restored.is_empty() && vanished == 0 {
            return Ok(());
        }
        let unmarked = self.restore(&restored);
        {
            let mut state = self.state.lock();
            let (manifest, budget) = (self.shape.manifest(), self.shape.budget());
            let State { space, absence, .. } = &mut *state;
            space.share_out(absence, &manifest, &budget);
            volumes.iter().for_each(|(volume, _)| state.space.resume_growth(*volume));
        }
        drop(growing);
        let (shown, dropped) = self.unhide_returned(&unmarked);
        tracing::warn!(
            volumes = volumes.len(),
            segments = restored.len(),
            runs = shown,
            pages_dropped = dropped,
            "absent space has returned"
        );
        drop(change);
        // The free space of the restored segments becomes reusable after this sync round and a
        // drain.
        self.make_durable_in_background()
    }

    /// Records that the volumes that `paths restore` left out have been searched for runs, except
    /// the volumes in `failed`: puts may then use the searched volumes, and segments beyond a
    /// volume's share of the capacity are emptied.
    ///
    /// # Errors
    /// `Retry` if another change of the capacity or directories, or the creation of a segment, has
    /// not ended after [`SHAPE_TIMEOUT`]; file-system errors of the manifest.
    pub(crate) fn end_search(&self, failed: &BTreeSet<u8>) -> Result<()> {
        let held = self.state.lock().space.unsearched().clone();
        let searched: Vec<u8> = held.difference(failed).copied().collect();
        if searched.is_empty() {
            return Ok(());
        }
        let until = Instant::now() + SHAPE_TIMEOUT;
        let busy = || {
            Error::retry(
                "the store's directories are being changed: search the volumes again (`ritornello \
                 fsck --salvage`)",
            )
        };
        let change = self.shape.change_by(until).ok_or_else(busy)?;
        let growing = self.shape.pause_growth(until).ok_or_else(busy)?;
        let mut manifest = Manifest::clone(&self.shape.manifest());
        for number in &searched {
            if let Some(volume) = manifest.volumes.get_mut(usize::from(*number)) {
                volume.unsearched = false;
            }
        }
        change.write(&manifest)?;
        {
            let mut state = self.state.lock();
            let State { space, absence, .. } = &mut *state;
            searched.iter().for_each(|number| space.hold_unsearched(*number, false));
            space.share_out(absence, &manifest, &self.shape.budget());
        }
        change.publish(manifest);
        drop(growing);
        self.maintenance.space.wake();
        Ok(())
    }

    /// Attaches absent volumes that have returned. Returns them with their segments.
    fn attach_volumes(&self, searching: bool) -> Vec<(u8, Vec<SegmentId>)> {
        let absent = self.state.lock().absence.volumes();
        let mut here = Vec::new();
        for number in absent {
            // Examine only this volume, because the disk of another volume may not answer, and on a
            // separate thread, because the disk of this volume may not answer either.
            let (manifest, directory) = (self.shape.manifest(), self.shape.directory().clone());
            let attach = move |segments: &Segments| {
                attach(segments, &directory, &manifest, number, searching)
            };
            match self.on_volume(number, attach) {
                Ok(segments) => here.push((number, segments)),
                Err(error) => {
                    // Another thread may have retired the volume during the call.
                    if let Some(reason) = self.state.lock().absence.volumes.get_mut(&number) {
                        *reason = error.to_string();
                    }
                }
            }
        }
        here
    }

    /// Adds returned segments to the space. Marks the extents of hidden runs, and of reservations
    /// withheld for living clients, as in use. All other extents are withheld until the removals
    /// made during the absence are durable and the segments are drained. Returns the extents of
    /// hidden runs that could not be marked as in use.
    fn restore(&self, segments: &[SegmentId]) -> HashSet<Extent> {
        let mut runs: HashMap<SegmentId, Vec<RunId>> = HashMap::new();
        for run in self.hidden.list(Cause::Absent) {
            let Some(view) = self.index.run(run) else { continue };
            let within: BTreeSet<SegmentId> =
                view.live_extents().iter().map(|extent| extent.segment).collect();
            for id in within {
                runs.entry(id).or_default().push(run);
            }
        }
        let mut unmarked = HashSet::new();
        for &id in segments {
            // Hold the lock until all extents are marked: a put could otherwise get an extent that
            // is in use. Apply pending removals first: the segment returns with the extents of
            // removed runs as free space, so a removal that is applied later would free them a
            // second time.
            let mut state = self.state.lock_without_removals();
            state.absence.segments.remove(&id);
            if !state.space.restore_segment(id) {
                continue;
            }
            for run in runs.remove(&id).into_iter().flatten() {
                let extents = self.index.run(run).map_or_else(Vec::new, |view| view.live_extents());
                for extent in extents.into_iter().filter(|e| e.segment == id) {
                    if !state.space.mark(&[extent]) {
                        unmarked.insert(extent);
                    }
                }
            }
            let State { space, reservations, unsynced, .. } = &mut *state;
            reservations.restore_segment(id, |extent| space.mark(std::slice::from_ref(extent)));
            space.withhold_for_drain(id);
            unsynced.segments.insert(id);
        }
        unmarked
    }

    /// Unhides the runs whose space has returned completely. Removes runs with extents that are in
    /// `unmarked` or in a removed segment, and all runs after them. Returns the number of runs
    /// unhidden and of pages dropped.
    fn unhide_returned(&self, unmarked: &HashSet<Extent>) -> (usize, u64) {
        let mut still = HashSet::new();
        let (mut shown, mut dropped) = (0, 0);
        for run in self.hidden.list(Cause::Absent) {
            let mut state = self.state.lock();
            let Some(view) = self.index.run(run) else { continue };
            let extents = view.live_extents();
            if state.absence.hides(&extents) {
                still.insert(run);
                continue;
            }
            let is_restored = |extent: &Extent| {
                !unmarked.contains(extent) && state.space.allocator().has_segment(extent.segment)
            };
            if extents.iter().all(is_restored) {
                shown += 1;
            } else {
                dropped += self.drop_unmarked(&mut state, run, unmarked);
            }
        }
        self.hide(still);
        (shown, dropped)
    }

    /// Hides the `absent` runs and the runs after them, and unhides all other runs.
    fn hide(&self, mut absent: HashSet<RunId>) {
        absent.retain(|run| self.index.place(*run).is_some());
        let behind = self.hidden.list(Cause::Behind);
        let parent = |run: &RunId| Some((*run, self.index.run(*run)?.parent?.0));
        let parents = behind.iter().chain(&absent).filter_map(parent).collect();
        self.hidden.replace(Hidden::new(&absent, &parents));
    }

    /// Removes `run` and all runs after it. Frees their extents, except extents in `unmarked`, and
    /// extents in removed or absent segments. Returns the number of pages removed.
    fn drop_unmarked(&self, state: &mut State, run: RunId, unmarked: &HashSet<Extent>) -> u64 {
        let mut removed = self.index.truncate(run, 0);
        for Removed { extents, .. } in &mut removed {
            let allocator = state.space.allocator();
            extents.retain(|e| !unmarked.contains(e) && allocator.has_segment(e.segment));
        }
        self.miss_causes.note_removed(&removed, MissCause::SpaceLost);
        state.apply_removals(removed, None).0
    }

    /// Retires an absent volume: removes its runs and all runs after them from the index, durably.
    ///
    /// # Errors
    /// `Fatal` if a sync failed: the store is poisoned. `Retry` if another change or the sync has
    /// not ended by `deadline`; the next owner then drops the remaining runs. `Closed` if the store
    /// is closed.
    pub(crate) fn retire_absent_volume(&self, number: u8, deadline: Instant) -> Result<()> {
        // Exclude `reattach_absent`, because both functions replace the hidden runs.
        let change = self.shape.change_by(deadline);
        let change = change
            .ok_or_else(|| Error::retry("the store's directories are being changed: try again"))?;
        let is_in_volume =
            |view: &RunView| view.live_extents().iter().any(|e| e.segment.volume() == number);
        let mut lost = Vec::new();
        self.index.for_each(&mut |run, view| {
            if is_in_volume(&view) {
                lost.push(run);
            }
        });
        for run in lost {
            let mut state = self.state.lock();
            let removed = self.index.truncate(run, 0);
            self.miss_causes.note_removed(&removed, MissCause::DirectoryForgotten);
            let (pages, _) = state.apply_removals(removed, None);
            self.counters.deleted_pages.add(pages);
        }
        self.hide(self.hidden.list(Cause::Absent).into_iter().collect());
        drop(change);
        self.make_durable_within(deadline)
    }
}

/// Attaches an absent volume if its directory contains the volume now. Returns the volume's
/// segments.
fn attach(
    segments: &Segments,
    directory: &Directory,
    manifest: &Manifest,
    number: u8,
    searching: bool,
) -> Result<Vec<SegmentId>> {
    let found = if searching {
        directory.volume_now(manifest, number)
    } else {
        directory.volume_state(manifest, number)
    };
    if let Some(why) = found.absence() {
        return Err(Error::retry(why));
    }
    if let VolumeState::Unmarked(dir) = &found {
        // Repair the marker before a segment is opened: a volume without its marker cannot be used.
        let marker = VolumeMarker { store: manifest.uuid, volume: number };
        if let Err(error) = directory.write_marker(dir, marker) {
            tracing::warn!(%error, dir = %dir.display(), "the marker of a volume could not be written");
        }
    }
    let candidate = segments.examine(&found.dir())?;
    if !candidate.is_trusted() {
        return Err(Error::invalid(
            "another machine or process serves this file system, so locks and durability are not \
             certain: mount the volume on a local file system",
        ));
    }
    segments.attach(number, candidate)?;
    segments.check_syncs(number).inspect_err(|_| segments.detach(number))?;
    let listed = segments.list_durably(number)?;
    // Check the marker after listing and syncing the directory, because an empty mount point lists
    // no files.
    if !directory.is_volume_present(manifest, number) {
        return Err(Error::retry("the volume became absent again while it was being reattached"));
    }
    Ok(listed)
}

/// Opens an absent segment, and restores its length. Returns `false` if its volume is present and
/// lacks the segment.
fn segment_exists(
    segments: &Segments,
    directory: &Directory,
    manifest: &Manifest,
    id: SegmentId,
) -> Result<bool> {
    let Err(error) = segments.restore_length(id) else { return Ok(true) };
    let listed = segments.list(id.volume());
    let is_gone = listed.is_ok_and(|listed| !listed.contains(&id))
        && directory.is_volume_present(manifest, id.volume());
    if is_gone { Ok(false) } else { Err(error) }
}
