//! The allocator of the owner: free space of all segments.
//!
//! The allocator is in memory only, and never persisted. At open, free space is derived from the
//! extents that the index names ([`Space::mark`]), so allocator and index cannot disagree after a
//! crash.
//!
//! **Rules.** `docs/space.md` gives their reasons. A run's header and page 0 are contiguous. If
//! page 0 is longer than 16 MiB, or does not fit into a segment with the header, the header and the
//! first 256 KiB of page 0 are contiguous. Pages of up to 256 KiB are never split, longer pages
//! only into pieces of at least 256 KiB. A run takes one hole (free extent) if possible, else few
//! holes, on one volume if possible; the volumes take bytes in proportion to their speeds. In a
//! full space of several volumes, two holes on the volume in turn precede one hole on another
//! volume. A page
//! longer than 16 MiB that is alone in its run is cut into equal pieces of at most 16 MiB; their
//! number is a multiple of the number of usable volumes (of 16, if there are more). Such a page is
//! placed like a shorter page if fewer than two volumes are usable, if it would have more than 32
//! pieces, or if no hole holds a piece. A share of all space (the reserve) stays free, so that runs
//! have a choice of holes.
//!
//! **Growth.** Segments are created on demand. When [`Space::allocate`] returns `None`, call
//! [`Space::next_segment`]. If it names a segment, create this segment, add it, and try again. If
//! the file system has no room for the segment, call [`Space::lend_share`] and try again; if the
//! creation failed for another reason, [`Space::stop_growth`]. Evict only when `next_segment`
//! returns `None`.
//!
//! **Shares.** A volume's share is the maximum number of its segments; all volumes together have a
//! maximum too ([`Space::set_shares`]). Segments beyond a share are sealed, the emptiest first: a
//! sealed segment takes no more runs, and once the store's owner has emptied it, it is removed
//! ([`Space::remove_segment`]). The number of a removed segment must not be used again: see
//! [`Space::start_numbers_at`].

mod free;
mod pick;
mod rotation;
mod shape;
mod shares;
mod stripe;

#[cfg(test)]
mod model;
#[cfg(test)]
mod steady;
#[cfg(test)]
mod tests;

use free::{FreeMap, SEGMENT_UNITS_LIMIT};
use pick::Pick;
use ritornello_format::{Error, Extent, SegmentId, UNIT};
use rotation::Rotation;
use shape::{LONG_PAGE_UNITS, RunShape};
use std::collections::BTreeMap;
use std::fmt;

/// Exclusive limit of segment numbers.
const SEGMENT_NUMBERS: u32 = 1 << 24;
/// Maximum extents of a run. For a run that would need more extents the store evicts pages instead,
/// to get longer free extents.
pub const RUN_EXTENTS_MAX: usize = 64;

/// Configuration of a [`Space`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpaceConfig {
    /// Length of every segment, in units.
    pub segment_units: u32,
    /// Maximum segments of each volume.
    pub volumes: Vec<u32>,
    /// Share of the capacity in percent that allocations with [`Reserve::Keep`] leave free.
    pub reserve_percent: u8,
}

/// Whether an allocation may use the reserve of free space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reserve {
    /// Leave the reserve free.
    Keep,
    /// Use the reserve as well.
    Use,
}

/// An extent or segment that contradicts the allocator's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpaceError {
    /// The extent is in no segment, past the end of its segment, or empty.
    OutOfRange(Extent),
    /// The extent to mark is not free.
    InUse(Extent),
    /// The extent to free is free already, at least in part.
    FreeAlready(Extent),
    /// The segment to add exists already, is on an unknown volume, or exceeds the volume's share;
    /// or the segment to remove is not sealed or not empty.
    Segment(SegmentId),
}

impl fmt::Display for SpaceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, extent) = match self {
            Self::OutOfRange(extent) => ("is outside the segments", extent),
            Self::InUse(extent) => ("overlaps space in use", extent),
            Self::FreeAlready(extent) => ("is free already", extent),
            Self::Segment(id) => {
                let (volume, number) = (id.volume(), id.number());
                return write!(
                    f,
                    "segment {volume}/{number} cannot be added or removed: it exists already, its \
                     volume is unknown or has no share left, or it is not sealed and empty"
                );
            }
        };
        let (id, start, units) = (extent.segment, extent.start, extent.units);
        write!(
            f,
            "the extent of {units} units at unit {start} of segment {}/{} {what}",
            id.volume(),
            id.number()
        )
    }
}

impl std::error::Error for SpaceError {}

/// Sizes of a [`Space`], and its counters since it was made. All lengths are in units of 4 KiB,
/// except the keys of `free_extents`. Free space in sealed segments is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpaceStats {
    /// Free units.
    pub free_units: u64,
    /// Units of the segments that exist.
    pub total_units: u64,
    /// Units of the segments that exist or may be created, without sealed segments.
    pub capacity_units: u64,
    /// Units that [`Reserve::Keep`] leaves free.
    pub reserve_units: u64,
    /// Number of free extents.
    pub holes: u64,
    /// Length of the largest free extent.
    pub largest: u32,
    /// Number of free extents by size class. The key is the class's lower bound in bytes, a power
    /// of two; its upper bound is twice that. Empty classes are left out.
    pub free_extents: BTreeMap<u64, u64>,
    /// Runs allocated.
    pub runs: u64,
    /// Extents of the allocated runs.
    pub extents: u64,
    /// Allocations refused for lack of space, including allocations with [`Reserve::Keep`] for
    /// which only the reserve has space.
    pub refused_reserve: u64,
    /// Allocations refused although enough space is free or can be created: the holes do not fit,
    /// because they are too small or because a segment must be created first.
    pub refused_shape: u64,
}

impl SpaceStats {
    /// Mean number of extents of the runs allocated since the space was made; 1 if no run was
    /// allocated.
    #[must_use]
    pub fn extents_per_run(&self) -> f64 {
        if self.runs == 0 { 1.0 } else { self.extents as f64 / self.runs as f64 }
    }
}

/// The free space of all volumes.
#[derive(Debug)]
pub struct Space {
    segment_units: u32,
    long_page_units: u32,
    reserve_percent: u8,
    volumes: Vec<Volume>,
    /// Maximum segments of all volumes together.
    segments_max: u64,
    /// The order in which allocation and growth try the volumes.
    rotation: Rotation,
    /// The volume on which the last allocation found no space, and which must grow before the run
    /// of that allocation fits.
    lacking: Option<usize>,
    runs: u64,
    extents: u64,
    refused_reserve: u64,
    refused_shape: u64,
}

#[derive(Debug, Default)]
struct Volume {
    free: FreeMap,
    /// Maximum segments of this volume.
    max: u32,
    /// Whether no segment is created: see [`Space::stop_growth`].
    stopped: bool,
    /// Whether other volumes may create the segments that the share has left: see
    /// [`Space::lend_share`].
    lends: bool,
    /// Whether nothing is allocated: see [`Space::avoid`].
    avoided: bool,
}

impl Volume {
    fn creatable(&self) -> u32 {
        if self.stopped { 0 } else { self.max.saturating_sub(self.free.segments()) }
    }

    /// Whether the volume may create segments of the shares of other volumes. A volume without a
    /// share is being emptied, or is not used.
    fn can_borrow(&self) -> bool {
        !self.stopped && self.max > 0
    }
}

impl Space {
    /// A space without segments.
    ///
    /// # Errors
    /// `Invalid` if segments are empty or 4 GiB and longer, if the number of volumes is zero or
    /// over 256, or if the reserve is over 50 %.
    pub fn new(config: SpaceConfig) -> ritornello_format::Result<Self> {
        let SpaceConfig { segment_units, volumes, reserve_percent } = config;
        if segment_units == 0 || segment_units >= SEGMENT_UNITS_LIMIT {
            return Err(Error::invalid("a segment is 4 KiB to less than 4 GiB")
                .with("segment_units", segment_units));
        }
        if volumes.is_empty() || volumes.len() > 256 || reserve_percent > 50 {
            return Err(Error::invalid(
                "a store has 1 to 256 volumes, and a reserve of at most 50 %",
            )
            .with("volumes", volumes.len())
            .with("reserve_percent", reserve_percent));
        }
        let volume = |max: u32| Volume { max: max.min(1 << 24), ..Volume::default() };
        Ok(Self {
            segment_units,
            long_page_units: LONG_PAGE_UNITS,
            reserve_percent,
            segments_max: volumes.iter().map(|max| u64::from(*max)).sum(),
            rotation: Rotation::new(volumes.len()),
            lacking: None,
            volumes: volumes.into_iter().map(volume).collect(),
            runs: 0,
            extents: 0,
            refused_reserve: 0,
            refused_shape: 0,
        })
    }

    /// Sets the length above which the only page of a run is divided over the volumes: 16 MiB, and
    /// less in tests. With less than 256 KiB for each usable volume, pieces would be shorter than
    /// 256 KiB.
    pub fn set_long_page(&mut self, units: u32) {
        self.long_page_units = units;
    }

    /// Adds a segment that was created; all of it is free.
    ///
    /// # Errors
    /// [`SpaceError::Segment`] if the segment exists already, is of an unknown volume, or exceeds
    /// both the volume's share and the maximum of all volumes; nothing is changed.
    pub fn add_segment(&mut self, id: SegmentId) -> Result<(), SpaceError> {
        let units = self.segment_units;
        // Does not ask whether the share that the segment takes is still lent: this may have
        // changed while the file was created.
        let is_below_total = self.segments() < self.segments_max;
        match self.volumes.get_mut(usize::from(id.volume())) {
            Some(Volume { free, max, .. })
                if (free.segments() < *max || (is_below_total && *max > 0))
                    && !free.has_segment(id.number()) =>
            {
                free.add_segment(id.number(), units);
                Ok(())
            }
            _ => Err(SpaceError::Segment(id)),
        }
    }

    /// Adds a segment that was absent; all of it is free. The segment's volume may exceed its share
    /// until [`Space::set_shares`] seals segments.
    ///
    /// # Errors
    /// [`SpaceError::Segment`] if the segment exists already or is of an unknown volume.
    pub fn restore_segment(&mut self, id: SegmentId) -> Result<(), SpaceError> {
        let units = self.segment_units;
        match self.volumes.get_mut(usize::from(id.volume())) {
            Some(Volume { free, .. }) if !free.has_segment(id.number()) => {
                free.add_segment(id.number(), units);
                Ok(())
            }
            _ => Err(SpaceError::Segment(id)),
        }
    }

    /// Whether a segment has been added.
    #[must_use]
    pub fn has_segment(&self, id: SegmentId) -> bool {
        let volume = self.volumes.get(usize::from(id.volume()));
        volume.is_some_and(|volume| volume.free.has_segment(id.number()))
    }

    /// The segment to create when the existing segments have no room. Its volume is the volume on
    /// which the last allocation found no space or, if it recorded no volume, the first volume
    /// of the allocation order. If this volume cannot grow, the volume with the smallest number of
    /// segments in proportion to its share, among the volumes that can grow, takes its place.
    /// `None` if no volume can grow, or the numbers of the volume's segments are used up.
    #[must_use]
    pub fn next_segment(&self) -> Option<SegmentId> {
        let order = self.order();
        let first = self.lacking.or_else(|| order.first().copied());
        let candidates = self.lacking.into_iter().chain(order);
        let less = |a: &Volume, b: &Volume| {
            u64::from(a.free.segments()) * u64::from(b.max)
                < u64::from(b.free.segments()) * u64::from(a.max)
        };
        let mut best: Option<usize> = None;
        for at in candidates.filter(|&at| self.can_grow(at)) {
            let better = best.is_none_or(|best| {
                Some(best) != first && less(&self.volumes[at], &self.volumes[best])
            });
            if better {
                best = Some(at);
            }
        }
        let at = best?;
        let number = self.volumes[at].free.unused_number();
        (number < SEGMENT_NUMBERS).then_some(SegmentId::new(u8::try_from(at).ok()?, number))
    }

    /// Whether `segment`, which [`Space::next_segment`] named earlier, must still be created: its
    /// volume can grow, and has not grown since that call. Unlike a second call of `next_segment`,
    /// the result does not depend on the runs that other threads have allocated in the meantime.
    #[must_use]
    pub fn is_creatable(&self, segment: SegmentId) -> bool {
        let at = usize::from(segment.volume());
        at < self.volumes.len()
            && self.can_grow(at)
            && self.volumes[at].free.unused_number() == segment.number()
    }

    fn can_grow(&self, volume: usize) -> bool {
        let volume = &self.volumes[volume];
        !volume.avoided
            && (volume.creatable() > 0 || (volume.can_borrow() && self.lent() > 0))
            && self.segments() < self.segments_max
    }

    /// The volumes that are not avoided, in the allocation order.
    fn order(&self) -> Vec<usize> {
        let mut order = self.rotation.order();
        order.retain(|at| !self.volumes[*at].avoided);
        order
    }

    /// Number of segments that exist.
    fn segments(&self) -> u64 {
        self.volumes.iter().map(|volume| u64::from(volume.free.segments())).sum()
    }

    /// Number of segments that may be created now.
    fn creatable(&self) -> u64 {
        let creatable = self.creatable_on(|volume| !volume.avoided);
        creatable.min(self.segments_max.saturating_sub(self.segments()))
    }

    /// Makes later allocations and [`Space::next_segment`] skip `volume` if `avoided`, or consider
    /// it again if not. The free space of an avoided volume still counts as free.
    pub fn avoid(&mut self, volume: u8, avoided: bool) {
        if let Some(volume) = self.volumes.get_mut(usize::from(volume)) {
            volume.avoided = avoided;
        }
    }

    /// The avoided volumes.
    pub fn avoided(&self) -> impl Iterator<Item = u8> + '_ {
        let avoided = (0..=u8::MAX).zip(&self.volumes).filter(|(_, volume)| volume.avoided);
        avoided.map(|(at, _)| at)
    }

    /// The segments of avoided volumes.
    pub fn avoided_segments(&self) -> impl Iterator<Item = SegmentId> + '_ {
        let avoided = (0..=u8::MAX).zip(&self.volumes).filter(|(_, volume)| volume.avoided);
        avoided.flat_map(|(at, volume)| volume.free.numbers().map(move |n| SegmentId::new(at, n)))
    }

    /// Marks free extents as in use: extents of stored runs, and space that must not be allocated
    /// yet. On an error no extent is marked.
    ///
    /// # Errors
    /// The extent that is not free or not inside a segment, and why.
    pub fn mark(&mut self, extents: &[Extent]) -> Result<(), SpaceError> {
        for (at, &extent) in extents.iter().enumerate() {
            let carved = self.volume_of(extent).and_then(|volume| volume.free.carve(extent));
            if let Err(error) = carved {
                let undone = self.free(&extents[..at]);
                debug_assert!(undone.is_ok(), "extents carved above can be released");
                return Err(error);
            }
        }
        Ok(())
    }

    /// Allocates extents for a header and `pages` pages under the rules of this module. In order,
    /// the extents are exactly the header and the pages. `None` if the run does not fit: see the
    /// module documentation for the next step.
    pub fn allocate(
        &mut self,
        header_units: u32,
        page_units: u32,
        pages: u32,
        reserve: Reserve,
    ) -> Option<Vec<Extent>> {
        debug_assert!(page_units > 0 && pages > 0, "an empty run needs no room");
        if page_units == 0 || pages == 0 {
            return None;
        }
        let (segment_units, long_page_units) = (self.segment_units, self.long_page_units);
        let shape = RunShape { header_units, page_units, pages, segment_units, long_page_units };
        self.lacking = None;
        if self.shortfall(shape.units(), reserve) > 0 {
            self.refused_reserve += 1;
            return None;
        }
        let extents = match self.allocate_stripes(shape) {
            Ok(Some(extents)) => Some(extents),
            Ok(None) => self.pick(shape).map(|picks| {
                picks.into_iter().map(|pick| self.take(pick)).collect::<Vec<Extent>>()
            }),
            Err(volume) => {
                self.lacking = Some(volume);
                None
            }
        };
        let Some(extents) = extents else {
            self.lacking = self.lacking.or_else(|| self.growing_volume(shape.units()));
            self.refused_shape += 1;
            return None;
        };
        debug_assert_eq!(
            extents.iter().map(|extent| u64::from(extent.units)).sum::<u64>(),
            shape.units(),
            "the extents are exactly the run"
        );
        self.runs += 1;
        self.extents += extents.len() as u64;
        Some(extents)
    }

    /// Number of units that must be freed before a run of `units` fits by size, if all segments
    /// that may be created exist. Fragmentation may require more.
    #[must_use]
    pub fn shortfall(&self, units: u64, reserve: Reserve) -> u64 {
        let keep = match reserve {
            Reserve::Keep => self.reserve_units(),
            Reserve::Use => 0,
        };
        let creatable = self.creatable() * u64::from(self.segment_units);
        (units + keep).saturating_sub(self.allocatable_units() + creatable)
    }

    /// Adds measured speeds of the volumes, by volume number, in a unit that is the same for all;
    /// zero for a volume that was not measured. Each volume takes bytes in proportion to its speed.
    /// A volume with at least 3/4 of the highest speed counts as having the highest speed; every
    /// slower volume counts as having at least 1/8 of it.
    pub fn measured(&mut self, speeds: &[u32]) {
        self.rotation.measured(speeds);
    }

    /// Frees extents.
    ///
    /// # Errors
    /// The first extent that is free already, at least in part, or outside the segments. Such
    /// extents are skipped, and all others are freed. The error means that the caller's accounting
    /// is wrong.
    pub fn free(&mut self, extents: &[Extent]) -> Result<(), SpaceError> {
        let mut result = Ok(());
        for &extent in extents {
            let freed = self.volume_of(extent).and_then(|volume| volume.free.release(extent));
            result = result.and(freed);
        }
        result
    }

    /// Free units of segments that are not sealed.
    #[must_use]
    pub fn free_units(&self) -> u64 {
        self.volumes.iter().map(|volume| volume.free.units()).sum()
    }

    /// Free units of segments that are not sealed, on volumes that are not avoided.
    #[must_use]
    pub fn allocatable_units(&self) -> u64 {
        let volumes = self.volumes.iter().filter(|volume| !volume.avoided);
        volumes.map(|volume| volume.free.units()).sum()
    }

    /// Units of the segments that exist, sealed segments included.
    #[must_use]
    pub fn total_units(&self) -> u64 {
        self.segments() * u64::from(self.segment_units)
    }

    /// Units of the segments that exist and are not sealed, and of the segments that may be
    /// created, also on avoided volumes.
    #[must_use]
    pub fn capacity_units(&self) -> u64 {
        self.capacity_on(|_| true)
    }

    /// The part of [`Space::capacity_units`] on volumes that are not avoided.
    #[must_use]
    pub fn usable_capacity_units(&self) -> u64 {
        self.capacity_on(|volume| !volume.avoided)
    }

    fn capacity_on(&self, which: impl Fn(&Volume) -> bool) -> u64 {
        let open = |which: &dyn Fn(&Volume) -> bool| -> u64 {
            let volumes = self.volumes.iter().filter(|volume| which(volume));
            volumes.map(|volume| u64::from(volume.free.open_segments())).sum()
        };
        let left = self.segments_max.saturating_sub(open(&|_| true));
        (open(&which) + self.creatable_on(which).min(left)) * u64::from(self.segment_units)
    }

    /// Units that [`Reserve::Keep`] leaves free: a share of the capacity of the volumes that are
    /// not avoided. Eviction fills the reserve, and frees no usable space on avoided volumes.
    #[must_use]
    pub fn reserve_units(&self) -> u64 {
        (self.usable_capacity_units() * u64::from(self.reserve_percent)).div_ceil(100)
    }

    /// Sizes and counters.
    #[must_use]
    pub fn stats(&self) -> SpaceStats {
        let mut stats = SpaceStats {
            free_units: self.free_units(),
            total_units: self.total_units(),
            capacity_units: self.capacity_units(),
            reserve_units: self.reserve_units(),
            runs: self.runs,
            extents: self.extents,
            refused_reserve: self.refused_reserve,
            refused_shape: self.refused_shape,
            ..SpaceStats::default()
        };
        for Volume { free, .. } in &self.volumes {
            stats.holes += free.holes();
            let largest = free.largest_first().next().map_or(0, free::Hole::units);
            stats.largest = stats.largest.max(largest);
            for (class, &count) in
                free.classes().iter().enumerate().filter(|(_, count)| **count > 0)
            {
                *stats.free_extents.entry(UNIT << class).or_default() += count;
            }
        }
        stats
    }

    /// Every free extent, by volume, segment and start.
    pub fn holes(&self) -> impl Iterator<Item = Extent> + '_ {
        (0..=u8::MAX).zip(&self.volumes).flat_map(|(at, volume)| volume.free.holes_of_volume(at))
    }

    /// Every free extent of one segment, by start.
    #[must_use]
    pub fn holes_in(&self, id: SegmentId) -> Vec<Extent> {
        let volume = self.volumes.get(usize::from(id.volume()));
        volume.map_or_else(Vec::new, |volume| volume.free.holes_of_segment(id).collect())
    }

    /// The volume of an extent, if the extent fits a segment.
    fn volume_of(&mut self, extent: Extent) -> Result<&mut Volume, SpaceError> {
        let end = extent.start.checked_add(extent.units);
        if extent.units == 0 || end.is_none_or(|end| end > self.segment_units) {
            return Err(SpaceError::OutOfRange(extent));
        }
        let volume = self.volumes.get_mut(usize::from(extent.segment.volume()));
        volume.ok_or(SpaceError::OutOfRange(extent))
    }

    fn take(&mut self, Pick { volume, hole, units }: Pick) -> Extent {
        self.volumes[usize::from(volume)].free.take(hole, units);
        self.rotation.take(usize::from(volume), u64::from(units));
        Extent { segment: SegmentId::new(volume, hole.number()), start: hole.start(), units }
    }
}
