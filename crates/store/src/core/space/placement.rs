//! Finds extents for a run: in free space, else after draining withheld space, else in a new
//! segment, else in the reserve, which eviction refills.

use super::StoreSpace;
use crate::budget::Budget;
use crate::catalog::Refusal;
use crate::core::StoreCore;
use crate::core::eviction_cause::EvictionCause;
use crate::machine_memory::check_memory;
use ritornello_format::{Error, Extent, Result, SegmentId};
use ritornello_volume::space::{Reserve, Space};
use std::error::Error as StdError;
use std::io;
use std::time::{Duration, Instant};

/// Maximum time that a put waits for withheld space before it creates a segment or evicts pages.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// Time during which a volume gets no new segment after the creation of a segment on it failed.
const GROWTH_PAUSE: Duration = Duration::from_secs(10);
/// Maximum rounds of evictions and a sync in the search for the space of one run.
const RECLAIM_ROUNDS: u32 = 16;

/// Deadlines of a put's waits for space. All runs of the put share them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpaceDeadline {
    /// Deadline of waits for withheld space.
    drain: Instant,
    /// Deadline of all other waits for space.
    pub(crate) space: Instant,
}

impl SpaceDeadline {
    /// Deadlines of a put: at `space` for any space, and earlier for withheld space.
    pub(crate) fn until(space: Instant) -> Self {
        Self { drain: space.min(Instant::now() + DRAIN_TIMEOUT), space }
    }
}

/// The reason why a run cannot be placed.
enum Obstacle {
    /// Space is withheld until a dead process's writes have ended.
    Drain,
    /// A segment with this id must be created first.
    Grow(SegmentId),
    /// Removals must be synced before their space is reused.
    Sync,
    /// No space can be freed, or the run exceeds the capacity of the usable volumes.
    Full,
}

/// Volumes on which a segment could not be created, each with the time from which the creation is
/// tried again.
#[derive(Debug, Default)]
pub(super) struct GrowthPauses(Vec<(u8, Instant)>);

impl GrowthPauses {
    /// Prevents new segments on a volume for [`GROWTH_PAUSE`]. If its file system lacks room, other
    /// volumes may use the volume's share in this time.
    fn pause(&mut self, allocator: &mut Space, volume: u8, lacks_room: bool) {
        if lacks_room {
            allocator.lend_share(volume);
        } else {
            allocator.stop_growth(volume);
        }
        self.0.push((volume, Instant::now() + GROWTH_PAUSE));
    }

    /// Permits new segments on volumes whose pause has ended.
    fn end(&mut self, allocator: &mut Space) {
        let now = Instant::now();
        self.0.retain(|(volume, until)| {
            if now >= *until {
                allocator.resume_growth(*volume);
            }
            now < *until
        });
    }
}

impl StoreCore {
    /// Finds extents for a run: its header, and `pages` pages of `page_units` units each.
    ///
    /// Returns `NoSpace` if the run exceeds the usable capacity, if no page can be evicted, if a
    /// sync failed or could not begin, or if [`RECLAIM_ROUNDS`] rounds gave no place; `Deadline` if
    /// the wait for a new segment or for a sync exceeded the deadline.
    pub(crate) fn find_space(
        &self,
        header_units: u32,
        page_units: u32,
        pages: u32,
        until: SpaceDeadline,
    ) -> std::result::Result<Vec<Extent>, Refusal> {
        let SpaceDeadline { drain: drain_until, space: deadline } = until;
        let (mut round, mut drains, mut has_grown) = (0, true, false);
        while round < RECLAIM_ROUNDS {
            let obstacle = match self.try_place(header_units, page_units, pages, round, drains) {
                Ok(extents) => return Ok(extents),
                Err(obstacle) => obstacle,
            };
            match obstacle {
                Obstacle::Drain => drains = self.await_drain(drain_until),
                Obstacle::Full => return Err(Refusal::NoSpace),
                // A new segment does not count as a round, because a long page takes many segments.
                // After the deadline only the creation of the run's first segment is begun, and only
                // if no other thread is creating one.
                Obstacle::Grow(_) if has_grown && Instant::now() >= deadline => {
                    return Err(Refusal::Deadline);
                }
                Obstacle::Grow(segment) => {
                    has_grown |= self.grow(segment, deadline)?;
                }
                Obstacle::Sync => {
                    round += 1;
                    if Instant::now() >= deadline {
                        return Err(Refusal::Deadline);
                    }
                    self.counters.reclaim_waits.add(1);
                    if self.make_durable_within(deadline).is_err() {
                        let late = Instant::now() >= deadline;
                        return Err(if late { Refusal::Deadline } else { Refusal::NoSpace });
                    }
                }
            }
        }
        Err(Refusal::NoSpace)
    }

    fn try_place(
        &self,
        header_units: u32,
        page_units: u32,
        pages: u32,
        round: u32,
        drains: bool,
    ) -> std::result::Result<Vec<Extent>, Obstacle> {
        let stalled = self.segments.stalled_volumes();
        let (mut state, now) = (self.state.lock(), Instant::now());
        let StoreSpace { allocator, growth, .. } = &mut state.space;
        growth.end(allocator);
        let space = &mut state.space;
        space.avoid_stalled(&stalled);
        space.begin_trials(now);
        if let Some(extents) = space.allocate(header_units, page_units, pages, Reserve::Keep, now) {
            return Ok(extents);
        }
        let allocator = &space.allocator;
        let run = u64::from(header_units) + u64::from(page_units) * u64::from(pages);
        // The run would not fit an empty store: the store has shrunk since the scope was
        // registered, a disk is full, or puts avoid a volume.
        if run > allocator.usable_capacity_units() {
            return Err(Obstacle::Full);
        }
        if drains && !state.space.draining.is_empty() {
            return Err(Obstacle::Drain);
        }
        if let Some(segment) = state.space.allocator.next_segment() {
            return Err(Obstacle::Grow(segment));
        }
        let needed = state.space.allocator.reserve_units() + run;
        let have = state.space.reclaimable();
        if have < needed {
            self.evict(&mut state, needed - have, EvictionCause::Space);
        }
        let space = &mut state.space;
        if let Some(extents) = space.allocate(header_units, page_units, pages, Reserve::Use, now) {
            return Ok(extents);
        }
        // The reclaimable space is fragmented, not durably free, or too little because runs are
        // protected. Each further round evicts another run's worth of units.
        let more = (round > 0 || state.space.usable_limbo_units() == 0)
            && self.evict(&mut state, run, EvictionCause::Space).is_some_and(|freed| freed > 0);
        if more || state.space.usable_limbo_units() > 0 {
            Err(Obstacle::Sync)
        } else {
            Err(Obstacle::Full)
        }
    }

    /// Does as [`StoreCore::add_segment`] on a separate thread, and waits for it until `deadline`.
    /// The thread then continues: a later put uses its segment.
    fn grow(&self, segment: SegmentId, deadline: Instant) -> std::result::Result<bool, Refusal> {
        let add = move |core: &Self| core.add_segment(segment, deadline);
        let is_late = move || Instant::now() >= deadline;
        self.beside("ritornello-grow", add, is_late).unwrap_or(Err(Refusal::Deadline))
    }

    /// Adds a segment file, unless the free-space floor, a lack of memory or the file system
    /// prevents it. One thread at a time adds a segment. If another thread has added a segment to
    /// the same volume since the caller tried to place its run, adds nothing, because the run may
    /// fit into that segment. Returns false if the volume was found not to grow now.
    fn add_segment(
        &self,
        segment: SegmentId,
        deadline: Instant,
    ) -> std::result::Result<bool, Refusal> {
        let _growing = self.shape.pause_growth(deadline).ok_or(Refusal::Deadline)?;
        // Check only the volume of `segment`: puts on other volumes may have changed which volume
        // `Space::next_segment` names.
        if !self.state.lock().space.allocator.is_creatable(segment) {
            return Ok(true);
        }
        let segment_bytes = self.shape.budget().segment_bytes;
        let manifest = self.shape.manifest();
        let volume = manifest.volumes.get(usize::from(segment.volume()));
        let volume = volume.map_or("", |volume| volume.dir.as_str());
        // The reason why the segment is not created, and whether it is a lack of room.
        let room = self.shape.directory().medium.room(&self.options.dir.join(volume));
        let created = match room.map_err(Error::from) {
            Ok(room) if room.available < segment_bytes + Budget::floor(room.total) => Err((
                format!("the free-space floor is reached ({} bytes left)", room.available),
                true,
            )),
            // A tmpfs may promise memory that the machine does not have: if the segment used this
            // memory, the kernel could kill a process.
            Ok(room) => match check_memory(&room, segment_bytes) {
                Err(error) => Err((error.to_string(), true)),
                Ok(()) => {
                    self.create(segment).map_err(|error| (error.to_string(), lacks_room(&error)))
                }
            },
            Err(error) => Err((error.to_string(), false)),
        };
        let mut state = self.state.lock();
        let space = &mut state.space;
        let added = created.and_then(|()| {
            space.allocator.add_segment(segment).map_err(|error| (error.to_string(), false))
        });
        if let Err((reason, lacks_room)) = added {
            tracing::warn!(
                %reason,
                segment = segment.number(),
                "a segment cannot be created: the volume does not grow for 10 seconds"
            );
            space.growth.pause(&mut space.allocator, segment.volume(), lacks_room);
            return Ok(false);
        }
        Ok(true)
    }

    /// Creates the file of a segment. If the creation fails, the segment's number is not used again
    /// before the next opening, because a file may be left.
    fn create(&self, segment: SegmentId) -> Result<()> {
        self.segments.create(segment).inspect_err(|_| {
            let mut state = self.state.lock();
            state.space.allocator.start_numbers_at(segment.volume(), segment.number() + 1);
        })
    }
}

/// Whether `error`, of the creation of a segment, means that the file system is full.
fn lacks_room(error: &Error) -> bool {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<io::Error>());
    let kind = cause.map(io::Error::kind);
    matches!(kind, Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;
    use ritornello_medium::SimDisk;
    use std::path::Path;
    use std::sync::Arc;

    /// Between the attempt to place a long page and the creation of the segment that it requested,
    /// short puts change which volume [`Space::next_segment`] names.
    #[test]
    fn growth_adds_the_segment_that_the_put_requested() {
        let options = Options {
            capacity: Some(64 << 20),
            segment_bytes: Some(1 << 20),
            paths: vec!["/a".into(), "/b".into()],
            background_threads: false,
            ..Options::new(Path::new("/store"))
        };
        let disk = Arc::new(SimDisk::new(128 << 20));
        let core = StoreCore::open(disk, &options, Arc::new(|_| false)).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let long = || core.try_place(2, 5000, 1, 0, true);
        let (mut grown, mut changed) = (0, 0);
        while let Err(obstacle) = long() {
            let Obstacle::Grow(segment) = obstacle else { panic!("the store must grow") };
            for _ in 0..grown % 4 {
                let _ = core.try_place(1, 1, 1, 0, true);
            }
            let next = core.state.lock().space.allocator.next_segment();
            changed += u32::from(next != Some(segment));
            core.grow(segment, deadline).unwrap();
            assert!(core.state.lock().space.allocator.has_segment(segment), "{segment:?}");
            grown += 1;
        }
        assert!(changed > 0, "short puts never changed the volume to grow next");
        assert!(grown >= 20, "5000 units take at least 20 segments of 256 units, not {grown}");
        // Two puts request the same segment: the request of the second put adds nothing.
        let Err(Obstacle::Grow(segment)) = long() else { panic!("the put needs no segment") };
        core.grow(segment, deadline).unwrap();
        core.grow(segment, deadline).unwrap();
        assert_eq!(core.state.lock().space.allocator.total_units(), (grown + 1) * 256);
    }
}
