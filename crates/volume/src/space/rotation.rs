//! The order in which volumes take bytes: each volume takes bytes in proportion to its speed.
//!
//! The order follows stride scheduling. Each volume has a position. When a volume takes units, its
//! position advances by their number, divided by the weight of the volume. The volume with the
//! lowest position takes the next units.

/// A volume counts as at least 1/8 as fast as the fastest, so that it is never unused, and so that
/// one wrong measurement does little harm.
const SLOWEST: u64 = 8;
/// A volume that is at least 3/4 as fast as the fastest counts as equally fast: on a shared machine
/// measurements of equal disks differ by up to a quarter. Two such volumes that take equal numbers
/// of bytes reach at least 6/7 of the sum of their speeds.
const EQUAL: (u64, u64) = (3, 4);
/// Advance of the position of the fastest volume for each unit that it takes.
const STEP: u64 = 1 << 10;
/// A new measurement has a weight of 1/4 in the smoothed speed.
const NEW_SHARE: u32 = 4;

/// The positions of all volumes, by volume number.
#[derive(Clone, Debug, Default)]
pub(super) struct Rotation {
    volumes: Vec<VolumePosition>,
}

#[derive(Clone, Copy, Debug, Default)]
struct VolumePosition {
    position: u64,
    /// Smoothed speed, in the unit of the speeds passed to [`Rotation::measured`]; zero before the
    /// first measurement of the volume.
    speed: u32,
}

impl Rotation {
    pub(super) fn new(volumes: usize) -> Self {
        Self { volumes: vec![VolumePosition::default(); volumes] }
    }

    /// Adds volumes up to `count` in all. A new volume begins at the lowest position of all
    /// volumes: if it began at zero, it would take all bytes until it caught up.
    pub(super) fn grow_to(&mut self, count: usize) {
        let position = self.volumes.iter().map(|volume| volume.position).min().unwrap_or(0);
        let count = count.max(self.volumes.len());
        self.volumes.resize(count, VolumePosition { position, speed: 0 });
    }

    /// Volume numbers in ascending order of position: the first is the next to take bytes.
    pub(super) fn order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.volumes.len()).collect();
        order.sort_by_key(|at| self.volumes[*at].position);
        order
    }

    /// Records that `volume` took `units`. Raises volumes with a lower position, which had no room,
    /// to the position of `volume`: otherwise they would take all bytes once they have room.
    pub(super) fn take(&mut self, volume: usize, units: u64) {
        let fastest = self.fastest();
        let Some(&VolumePosition { position, speed }) = self.volumes.get(volume) else { return };
        for volume in &mut self.volumes {
            volume.position = volume.position.max(position);
        }
        let speed = u64::from(speed);
        let is_fast = speed == 0 || speed * EQUAL.1 >= fastest * EQUAL.0;
        let weight = if is_fast { fastest } else { speed.max(fastest / SLOWEST) };
        self.volumes[volume].position += units * STEP * fastest / weight.max(1);
    }

    fn fastest(&self) -> u64 {
        let speeds = self.volumes.iter().map(|volume| u64::from(volume.speed));
        speeds.max().unwrap_or(0).max(1)
    }

    /// Adds measured speeds, by volume number, in a unit that is the same for all; zero for a
    /// volume that was not measured.
    pub(super) fn measured(&mut self, speeds: &[u32]) {
        for (volume, &speed) in self.volumes.iter_mut().zip(speeds).filter(|(_, speed)| **speed > 0)
        {
            volume.speed = match volume.speed {
                0 => speed,
                old => old - old / NEW_SHARE + speed / NEW_SHARE,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Places `count` equal extents on volumes for which `has_room` returns true. Returns the
    /// number of extents on each volume.
    fn taken(
        rotation: &mut Rotation,
        count: usize,
        has_room: impl Fn(usize) -> bool,
    ) -> Vec<usize> {
        let mut taken = vec![0; rotation.volumes.len()];
        for _ in 0..count {
            let at = rotation.order().into_iter().find(|at| has_room(*at)).unwrap();
            rotation.take(at, 100);
            taken[at] += 1;
        }
        taken
    }

    #[test]
    fn equal_volumes_alternate() {
        let mut rotation = Rotation::new(3);
        assert_eq!(rotation.order(), [0, 1, 2]);
        rotation.take(0, 5);
        assert_eq!(rotation.order(), [1, 2, 0]);
        rotation.take(1, 1);
        assert_eq!(rotation.order(), [2, 1, 0], "the volume with the fewest bytes must be first");
        assert_eq!(taken(&mut Rotation::new(3), 9, |_| true), [3, 3, 3]);
    }

    #[test]
    fn faster_volumes_take_more() {
        let mut rotation = Rotation::new(3);
        rotation.measured(&[300, 100, 1]);
        // The third volume counts as 1/8 as fast as the first.
        assert_eq!(taken(&mut rotation, 35, |_| true), [24, 8, 3]);
        for _ in 0..100 {
            rotation.measured(&[1000, 900, 850]);
        }
        let even = taken(&mut rotation, 30, |_| true);
        assert!(even.iter().all(|count| (9..=11).contains(count)), "{even:?}");
    }

    #[test]
    fn unmeasured_volumes_count_as_fast() {
        let mut rotation = Rotation::new(2);
        rotation.measured(&[200]);
        assert_eq!(taken(&mut rotation, 10, |_| true), [5, 5]);
    }

    #[test]
    fn full_and_new_volumes_do_not_catch_up() {
        let mut rotation = Rotation::new(2);
        assert_eq!(taken(&mut rotation, 50, |at| at == 1), [0, 50]);
        let even = taken(&mut rotation, 20, |_| true);
        assert!(even[0].abs_diff(even[1]) <= 2, "{even:?}");
        rotation.grow_to(3);
        let even = taken(&mut rotation, 30, |_| true);
        assert!(even[2].abs_diff(even[1]) <= 2, "{even:?}");
    }
}
