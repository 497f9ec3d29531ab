//! The segments that each volume may hold, and the sealing of surplus segments.

use super::{Space, SpaceError, Volume};
use ritornello_format::SegmentId;

impl Space {
    /// Sets the maximum number of segments of each volume (its share), and of all volumes together.
    /// Adds volumes if `shares` has more entries than there are volumes. If a volume has more
    /// segments than its share, seals its emptiest segments, so that the share remains unsealed.
    /// Unseals all other segments, except segments whose removal has begun.
    pub fn set_shares(&mut self, shares: &[u32], segments_max: u32) {
        self.segments_max = u64::from(segments_max);
        while self.volumes.len() < shares.len() {
            self.volumes.push(Volume::default());
        }
        self.rotation.grow_to(shares.len());
        for (at, volume) in self.volumes.iter_mut().enumerate() {
            volume.max = shares.get(at).copied().unwrap_or(0).min(super::SEGMENT_NUMBERS);
            for number in volume.free.sealed().collect::<Vec<_>>() {
                volume.free.set_sealed(number, false);
            }
            let staying = volume.free.segments() - volume.free.removing();
            let surplus = staying.saturating_sub(volume.max) as usize;
            for number in volume.free.emptiest_first().into_iter().take(surplus) {
                volume.free.set_sealed(number, true);
            }
        }
    }

    /// Makes later calls of [`Space::next_segment`] skip `volume`. Until [`Space::resume_growth`]
    /// the volume's capacity equals the size of its existing segments.
    pub fn stop_growth(&mut self, volume: u8) {
        if let Some(volume) = self.volumes.get_mut(usize::from(volume)) {
            (volume.stopped, volume.lends) = (true, false);
        }
    }

    /// Stops the growth of a volume whose file system has no room for another segment. Until
    /// [`Space::resume_growth`] other volumes may create the segments that its share has left:
    /// otherwise pages would be evicted although other file systems have room.
    pub fn lend_share(&mut self, volume: u8) {
        if let Some(volume) = self.volumes.get_mut(usize::from(volume)) {
            (volume.stopped, volume.lends) = (true, true);
        }
    }

    /// Reverts [`Space::stop_growth`] and [`Space::lend_share`]. Segments that other volumes have
    /// created beyond their shares stay, so the volume may not get its whole share.
    pub fn resume_growth(&mut self, volume: u8) {
        if let Some(volume) = self.volumes.get_mut(usize::from(volume)) {
            (volume.stopped, volume.lends) = (false, false);
        }
    }

    /// Number of segments that volumes may create beyond their shares.
    pub(super) fn lent(&self) -> u64 {
        let (mut lent, mut borrowed) = (0, 0);
        for Volume { free, max, lends, .. } in &self.volumes {
            lent += if *lends { u64::from(max.saturating_sub(free.segments())) } else { 0 };
            borrowed += u64::from(free.segments().saturating_sub(*max));
        }
        lent.saturating_sub(borrowed)
    }

    /// Number of segments that the volumes selected by `which` may create, without regard to the
    /// maximum of all volumes.
    pub(super) fn creatable_on(&self, which: impl Fn(&Volume) -> bool) -> u64 {
        let volumes = || self.volumes.iter().filter(|volume| which(volume));
        let own: u64 = volumes().map(|volume| u64::from(volume.creatable())).sum();
        if volumes().any(Volume::can_borrow) { own + self.lent() } else { own }
    }

    /// Number of segments of each volume.
    #[must_use]
    pub fn segments_by_volume(&self) -> Vec<u32> {
        self.volumes.iter().map(|volume| volume.free.segments()).collect()
    }

    /// Units in use on each volume.
    #[must_use]
    pub fn used_by_volume(&self) -> Vec<u64> {
        let used = |volume: &Volume| {
            u64::from(volume.free.segments()) * u64::from(self.segment_units)
                - volume.free.units()
                - volume.free.sealed_units()
        };
        self.volumes.iter().map(used).collect()
    }

    /// The segments that are sealed.
    #[must_use]
    pub fn sealed(&self) -> Vec<SegmentId> {
        let each = (0..=u8::MAX).zip(&self.volumes);
        each.flat_map(|(at, volume)| volume.free.sealed().map(move |n| SegmentId::new(at, n)))
            .collect()
    }

    /// Whether a segment is sealed: it takes no runs until it is unsealed.
    #[must_use]
    pub fn is_sealed(&self, id: SegmentId) -> bool {
        let volume = self.volumes.get(usize::from(id.volume()));
        volume.is_some_and(|volume| volume.free.is_sealed(id.number()))
    }

    /// Whether nothing is allocated in a segment.
    #[must_use]
    pub fn is_empty(&self, id: SegmentId) -> bool {
        let volume = self.volumes.get(usize::from(id.volume()));
        volume.is_some_and(|v| v.free.free_in(id.number()) == u64::from(self.segment_units))
    }

    /// Free units of a segment.
    #[must_use]
    pub fn free_in(&self, id: SegmentId) -> u64 {
        let volume = self.volumes.get(usize::from(id.volume()));
        volume.map_or(0, |volume| volume.free.free_in(id.number()))
    }

    /// Free units of sealed segments.
    #[must_use]
    pub fn sealed_units(&self) -> u64 {
        self.volumes.iter().map(|volume| volume.free.sealed_units()).sum()
    }

    /// Marks a sealed segment whose file is about to be removed. The segment is never unsealed,
    /// even if the removal fails half way, because its blocks may be freed already.
    pub fn begin_removal(&mut self, id: SegmentId) {
        if let Some(volume) = self.volumes.get_mut(usize::from(id.volume())) {
            volume.free.begin_removal(id.number());
        }
    }

    /// Forgets a sealed segment that is empty, after its file is removed.
    ///
    /// # Errors
    /// [`SpaceError::Segment`] if the segment is not sealed or not empty; the space is then
    /// unchanged.
    pub fn remove_segment(&mut self, id: SegmentId) -> Result<(), SpaceError> {
        let units = self.segment_units;
        let volume = self.volumes.get_mut(usize::from(id.volume()));
        match volume.is_some_and(|volume| volume.free.remove_segment(id.number(), units)) {
            true => Ok(()),
            false => Err(SpaceError::Segment(id)),
        }
    }

    /// Raises the lowest number that new segments of a volume may get to `number`. Never lowers it.
    /// A process that still has a removed segment open must not mistake a new segment for the
    /// removed one.
    pub fn start_numbers_at(&mut self, volume: u8, number: u32) {
        if let Some(volume) = self.volumes.get_mut(usize::from(volume)) {
            volume.free.start_numbers_at(number);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::space::{Reserve, Space, SpaceConfig};
    use ritornello_format::{Extent, SegmentId};

    const SEGMENT: u32 = 100;

    fn space(volumes: &[u32]) -> Space {
        let volumes = volumes.to_vec();
        let config = SpaceConfig { segment_units: SEGMENT, volumes, reserve_percent: 10 };
        let mut space = Space::new(config).unwrap();
        while let Some(id) = space.next_segment() {
            space.add_segment(id).unwrap();
        }
        space
    }

    #[test]
    fn emptiest_segment_is_sealed_and_removed_when_empty() {
        let mut space = space(&[3]);
        let extent = |number, units| Extent { segment: SegmentId::new(0, number), start: 0, units };
        space.mark(&[extent(0, 60), extent(1, 5), extent(2, 40)]).unwrap();
        space.set_shares(&[2], 2);
        let sealed = SegmentId::new(0, 1);
        assert_eq!(space.sealed(), [sealed]);
        assert_eq!((space.free_units(), space.sealed_units()), (100, 95));
        assert_eq!((space.capacity_units(), space.total_units()), (200, 300));
        assert_eq!(space.next_segment(), None);
        while let Some(run) = space.allocate(1, 9, 1, Reserve::Use) {
            assert_ne!(run[0].segment, sealed);
        }
        assert!(space.remove_segment(sealed).is_err(), "the segment is not empty");
        space.free(&[extent(1, 5)]).unwrap();
        assert!(space.is_empty(sealed));
        space.remove_segment(sealed).unwrap();
        assert_eq!(space.total_units(), 200);
        assert!(space.sealed().is_empty() && space.remove_segment(sealed).is_err());
    }

    #[test]
    fn growing_share_unseals_segments() {
        let mut space = space(&[4]);
        let free = space.free_units();
        space.set_shares(&[1], 1);
        assert_eq!((space.sealed().len(), space.free_units()), (3, 100));
        space.set_shares(&[4], 4);
        assert_eq!((space.sealed().len(), space.free_units()), (0, free));
    }

    #[test]
    fn partly_removed_segment_stays_sealed() {
        let mut space = space(&[3]);
        space.set_shares(&[1], 1);
        let sealed = space.sealed();
        space.begin_removal(sealed[0]);
        space.set_shares(&[3], 3);
        assert_eq!((space.sealed(), space.free_units()), (sealed[..1].to_vec(), 200));
        assert_eq!(space.next_segment(), None, "three segments exist, which is the maximum");
        space.set_shares(&[2], 2);
        assert_eq!(space.sealed(), sealed[..1], "two segments remain besides the sealed segment");
        space.remove_segment(sealed[0]).unwrap();
        space.set_shares(&[3], 3);
        assert!(space.next_segment().is_some());
    }

    #[test]
    fn numbers_of_removed_segments_are_not_reused() {
        let mut space = space(&[3]);
        space.set_shares(&[1], 1);
        space.start_numbers_at(0, 3);
        for id in space.sealed() {
            assert!(space.is_empty(id));
            space.remove_segment(id).unwrap();
        }
        space.set_shares(&[2], 2);
        assert_eq!(space.next_segment(), Some(SegmentId::new(0, 3)));
    }

    #[test]
    fn draining_volume_delays_growth_of_others() {
        let mut space = space(&[2, 2]);
        space.set_shares(&[0, 4, 4], 4);
        assert_eq!(space.next_segment(), None, "four segments exist, which is the maximum");
        let sealed = space.sealed()[0];
        space.remove_segment(sealed).unwrap();
        assert_ne!(space.next_segment().unwrap().volume(), 0);
        assert_eq!(space.segments_by_volume(), [1, 2, 0]);
    }

    /// Adds the segments that [`Space::next_segment`] names, at most `most`.
    fn grow(space: &mut Space, most: usize) {
        for _ in 0..most {
            let Some(id) = space.next_segment() else { return };
            space.add_segment(id).unwrap();
        }
    }

    #[test]
    fn other_volumes_take_the_share_of_a_full_file_system() {
        let volumes = vec![4; 3];
        let config = SpaceConfig { segment_units: SEGMENT, volumes, reserve_percent: 0 };
        let mut space = Space::new(config).unwrap();
        (0..3).for_each(|volume| space.add_segment(SegmentId::new(volume, 0)).unwrap());
        space.lend_share(0);
        assert_eq!(space.capacity_units(), 1200);
        grow(&mut space, 100);
        let segments = space.segments_by_volume();
        assert_eq!((segments[0], segments.iter().sum::<u32>()), (1, 12));
        assert!(segments[1] > 4 || segments[2] > 4, "{segments:?}");
        assert_eq!((space.capacity_units(), space.total_units()), (1200, 1200));
        space.resume_growth(0);
        assert_eq!(space.next_segment(), None, "the maximum of all volumes is reached");
        // Shares that are set again seal no segment.
        space.set_shares(&segments, 12);
        assert!(space.sealed().is_empty());
    }

    #[test]
    fn volume_with_room_again_takes_its_own_share() {
        let mut space = space(&[1, 2]);
        space.set_shares(&[4, 2], 6);
        space.lend_share(0);
        assert_eq!(space.next_segment(), Some(SegmentId::new(1, 2)));
        grow(&mut space, 1);
        space.resume_growth(0);
        grow(&mut space, 100);
        assert_eq!(space.segments_by_volume(), [3, 3], "volume 1 must keep the segment it took");
    }

    #[test]
    fn shares_are_lent_only_for_lack_of_room_and_to_volumes_that_have_room() {
        let mut space = space(&[1, 1, 1]);
        space.set_shares(&[4, 1, 0], 5);
        space.stop_growth(0);
        assert_eq!((space.next_segment(), space.capacity_units()), (None, 200));
        space.lend_share(0);
        assert_eq!(space.capacity_units(), 400, "the segment of volume 2 must count as borrowed");
        assert_eq!(space.next_segment(), Some(SegmentId::new(1, 1)));
        space.lend_share(1);
        assert_eq!((space.next_segment(), space.capacity_units()), (None, 200));
    }
}
