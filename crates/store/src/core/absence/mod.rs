//! Absent volumes and segments, and the runs stored in them.
//!
//! Pages must survive a late mount, a limit on open files or a failing disk, so the index keeps the
//! runs in absent space. Until the space returns, these runs are *hidden*, and in chained scopes
//! the runs after them as well: lookups miss hidden runs, and puts of their pages are refused as
//! `absent_space`. Eviction skips runs in absent space: their pages are to be hits later.

pub(crate) mod hidden;
mod reattach;

use crate::stats::AbsentSpace;
use crate::volumes::VolumeState;
use ritornello_format::{Extent, Manifest, SegmentId};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Interval of checks for absent volumes and segments.
pub(crate) const ABSENT_INTERVAL: Duration = Duration::from_secs(2);
/// Maximum number of absent volumes and segments whose reasons [`Absence::describe`] reports.
const REASONS_MAX: usize = 64;

/// The absent volumes and segments, each with the reason why it is absent.
#[derive(Debug, Default)]
pub(crate) struct Absence {
    volumes: BTreeMap<u8, String>,
    /// Absent segments of present volumes.
    segments: BTreeMap<SegmentId, String>,
    /// Segments of absent volumes that hold runs of the index. These segments count towards the
    /// store's capacity.
    known: BTreeMap<u8, BTreeSet<SegmentId>>,
}

impl Absence {
    /// Returns the volumes of `manifest` that are absent according to `found`, the state of each
    /// volume.
    pub(crate) fn of(manifest: &Manifest, found: &[VolumeState]) -> Self {
        let mut absence = Self::default();
        for (number, at) in (0..=u8::MAX).zip(found) {
            if let Some(why) = at.absence() {
                let dir = manifest.volumes.get(usize::from(number)).map_or("", |v| v.dir.as_str());
                tracing::warn!(
                    dir,
                    why,
                    "a volume is absent: its pages are misses until it returns"
                );
                absence.volumes.insert(number, why.to_owned());
            }
        }
        absence
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.volumes.is_empty() && self.segments.is_empty()
    }

    /// Why a volume is absent; `None` if it is present.
    pub(crate) fn why(&self, volume: u8) -> Option<&str> {
        self.volumes.get(&volume).map(String::as_str)
    }

    pub(crate) fn volumes(&self) -> Vec<u8> {
        self.volumes.keys().copied().collect()
    }

    /// The absent segments of present volumes.
    pub(crate) fn segments(&self) -> impl Iterator<Item = SegmentId> + '_ {
        self.segments.keys().copied()
    }

    pub(crate) fn add_volume(&mut self, volume: u8, why: String) {
        self.volumes.insert(volume, why);
    }

    /// Records that a volume is no longer absent.
    pub(crate) fn remove_volume(&mut self, volume: u8) {
        self.volumes.remove(&volume);
    }

    pub(crate) fn add_segment(&mut self, segment: SegmentId, why: String) {
        self.segments.insert(segment, why);
    }

    pub(crate) fn covers(&self, segment: SegmentId) -> bool {
        self.volumes.contains_key(&segment.volume()) || self.segments.contains_key(&segment)
    }

    /// Whether any of `extents` is in absent space.
    pub(crate) fn hides(&self, extents: &[Extent]) -> bool {
        !self.is_empty() && extents.iter().any(|extent| self.covers(extent.segment))
    }

    /// Says where the first of `extents` in absent space is, and why it is absent. `manifest` names
    /// the directories of the volumes.
    pub(crate) fn reason(&self, extents: &[Extent], manifest: &Manifest) -> Option<String> {
        extents.iter().find_map(|Extent { segment, .. }| {
            let dir = manifest.volumes.get(usize::from(segment.volume()))?.dir.as_str();
            let of_segment = || Some((segment, self.segments.get(segment)?));
            match self.volumes.get(&segment.volume()) {
                Some(why) => Some(format!("{dir}: {why}")),
                None => {
                    of_segment().map(|(id, why)| format!("{dir}, segment {}: {why}", id.number()))
                }
            }
        })
    }

    /// Records the segments of absent volumes that hold `extents`, the extents of a hidden run, so
    /// that these segments count towards the store's capacity.
    pub(crate) fn note(&mut self, extents: &[Extent]) {
        for segment in extents.iter().map(|extent| extent.segment) {
            if self.volumes.contains_key(&segment.volume()) {
                self.known.entry(segment.volume()).or_default().insert(segment);
            }
        }
    }

    /// Returns the number of segments of volume `number` that are known to be absent; the volume
    /// may have more.
    pub(crate) fn segments_of(&self, number: u8) -> u32 {
        let known = self.known.get(&number).map_or(0, BTreeSet::len);
        let single = self.segments.keys().filter(|id| id.volume() == number).count();
        (known + single) as u32
    }

    /// Removes a retired volume and its segments from the absent space.
    pub(crate) fn retire(&mut self, number: u8) {
        self.volumes.remove(&number);
        self.known.remove(&number);
        self.segments.retain(|id, _| id.volume() != number);
    }

    /// Describes the absent space. `manifest` names the directories of the volumes.
    pub(crate) fn describe(&self, manifest: &Manifest, hidden_runs: u64) -> AbsentSpace {
        let dir = |volume: u8| {
            manifest.volumes.get(usize::from(volume)).map_or("", |v| v.dir.as_str()).to_owned()
        };
        let volumes = self.volumes.iter().map(|(at, why)| format!("{}: {why}", dir(*at)));
        let segments = self
            .segments
            .iter()
            .map(|(id, why)| format!("{}, segment {}: {why}", dir(id.volume()), id.number()));
        AbsentSpace {
            reasons: volumes.chain(segments).take(REASONS_MAX).collect(),
            runs: hidden_runs,
        }
    }

    /// Records that the absent volume `number` has returned: marks the volume as present, and each
    /// of its `segments` as absent until the segment is restored.
    fn list(&mut self, number: u8, segments: &[SegmentId]) {
        self.volumes.remove(&number);
        self.known.remove(&number);
        let listed = segments.iter().map(|id| (*id, "the segment is being restored".to_owned()));
        self.segments.extend(listed);
    }
}
