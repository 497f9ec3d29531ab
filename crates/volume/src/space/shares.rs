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
}
