//! The manifest: identity and layout of a store.

use crate::whole_file::{seal, unseal};
use crate::wire::{Reader, Writer};
use crate::{Error, Result};
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"RTRNMANI";
/// Bits of the flags in a volume's entry.
const DRAINING: u8 = 1;
const MARKED: u8 = 2;
const UNSEARCHED: u8 = 4;

/// The manifest's entry for one volume.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct VolumeRecord {
    /// The volume's directory: relative to the store's directory, or absolute. Empty if the volume
    /// is retired; the number of a retired volume is not used again.
    pub dir: String,
    /// No new run is placed in the volume, and the volume is retired once its segments are removed.
    pub draining: bool,
    /// The lowest number that new segments may get. Segments with lower numbers may have been
    /// removed, and processes may still have them open.
    pub first_segment: u32,
    /// The directory carries this volume's [`VolumeMarker`](crate::VolumeMarker). If `marked` is
    /// set and the marker is missing, the volume's file system is probably not mounted.
    pub marked: bool,
    /// A restore of the store left the volume out: its segments may hold runs that the index lacks,
    /// so no segment of the volume is reused or removed before the segments are searched.
    pub unsearched: bool,
}

impl VolumeRecord {
    /// A volume without segments.
    #[must_use]
    pub fn new(dir: impl Into<String>) -> Self {
        Self { dir: dir.into(), ..Self::default() }
    }

    /// Whether the volume is retired.
    #[must_use]
    pub fn is_retired(&self) -> bool {
        self.dir.is_empty()
    }

    /// Whether new runs may be placed in the volume.
    #[must_use]
    pub fn is_active(&self) -> bool {
        !self.is_retired() && !self.draining
    }

    fn encode(&self) -> Writer {
        let mut entry = Writer::new();
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        let flags = flag(self.draining, DRAINING)
            | flag(self.marked, MARKED)
            | flag(self.unsearched, UNSEARCHED);
        entry.blob(self.dir.as_bytes()).u32(self.first_segment).u8(flags);
        entry
    }

    fn decode(entry: &[u8]) -> Result<Self> {
        let mut reader = Reader::new(entry);
        let (dir, first_segment, flags) = (reader.text()?, reader.u32()?, reader.u8()?);
        let is_set = |flag| flags & flag != 0;
        Ok(Self {
            dir,
            draining: is_set(DRAINING),
            first_segment,
            marked: is_set(MARKED),
            unsearched: is_set(UNSEARCHED),
        })
    }
}

/// The identity and layout of a store. The file is replaced as a whole (new file, rename), for
/// example at every open and clean close.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// Drawn at random when the store was created. Ties segments to their store.
    pub uuid: [u8; 16],
    /// Increased by 1 at each opening by an owner, and by 65,536 at each restore; zero while the
    /// store is being created or restored.
    pub owner_epoch: u32,
    /// Upper 32 bits of the last owner's run generations. Every owner increments this number at
    /// open, and again before the lower 32 bits run out, so that no generation is used twice.
    pub generations: u32,
    /// The store is new, or the last owner closed the store when all changes were durable, no
    /// volume or segment was absent, and no write of this owner or of a dead process was in flight.
    /// If false, reads of the store's files may return bytes that are in the page cache and never
    /// reach the disk, and writes of earlier processes may still be in flight.
    pub clean: bool,
    /// Length of a segment file in bytes.
    pub segment_bytes: u64,
    /// Maximum bytes of segments and metadata together.
    pub capacity: u64,
    /// Name of the index backend.
    pub index: String,
    /// The volumes. A volume's position in this list is its number.
    pub volumes: Vec<VolumeRecord>,
    /// Host, boot and process id of the last owner, for diagnostics.
    pub owner: String,
}

impl Manifest {
    /// Whether a restore of the store has begun and not ended. A store that is being created has
    /// the owner epoch zero too, but its `generations` is also zero.
    #[must_use]
    pub fn is_being_restored(&self) -> bool {
        self.owner_epoch == 0 && self.generations > 0
    }

    /// Whether the store has a volume that a restore left out and no salvage has searched yet.
    #[must_use]
    pub fn has_unsearched(&self) -> bool {
        self.volumes.iter().any(|volume| volume.unsearched && !volume.is_retired())
    }

    /// The directory of every volume of the store in `dir`; empty for retired volumes.
    #[must_use]
    pub fn paths(&self, dir: &Path) -> Vec<PathBuf> {
        let path = |volume: &VolumeRecord| {
            if volume.is_retired() { PathBuf::new() } else { dir.join(&volume.dir) }
        };
        self.volumes.iter().map(path).collect()
    }

    /// The directories of all volumes that are not retired.
    #[must_use]
    pub fn directories(&self, dir: &Path) -> Vec<PathBuf> {
        self.paths(dir).into_iter().filter(|path| !path.as_os_str().is_empty()).collect()
    }

    /// Encodes the file: a whole-file record (module `whole_file`).
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Writer::new();
        body.raw(&self.uuid)
            .u32(self.owner_epoch)
            .u32(self.generations)
            .u8(u8::from(self.clean))
            .u64(self.segment_bytes)
            .u64(self.capacity)
            .blob(self.index.as_bytes())
            .blob(self.owner.as_bytes())
            .u32(self.volumes.len() as u32);
        for volume in &self.volumes {
            body.blob(volume.encode().as_slice());
        }
        seal(MAGIC, body.as_slice())
    }

    /// Whether `bytes` begin with the magic number of a manifest. The manifest may be damaged, or
    /// of another format version.
    #[must_use]
    pub fn recognize(bytes: &[u8]) -> bool {
        bytes.starts_with(MAGIC)
    }

    /// Decodes what [`Manifest::encode`] wrote.
    ///
    /// # Errors
    /// `Invalid` if the file is not a manifest, or of another version or with unknown features;
    /// `Fatal` if the manifest is damaged.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let damaged = |error: Error| Error::fatal("the manifest is damaged").because(error);
        let body = unseal(MAGIC, "store", bytes)?;
        (|| {
            let mut reader = Reader::new(body);
            let mut manifest = Self {
                uuid: reader.array()?,
                owner_epoch: reader.u32()?,
                generations: reader.u32()?,
                clean: reader.u8()? != 0,
                segment_bytes: reader.u64()?,
                capacity: reader.u64()?,
                index: reader.text()?,
                owner: reader.text()?,
                volumes: Vec::new(),
            };
            for _ in 0..reader.u32()? {
                manifest.volumes.push(VolumeRecord::decode(reader.blob()?)?);
            }
            Ok(manifest)
        })()
        .map_err(damaged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        Manifest {
            uuid: [7; 16],
            owner_epoch: 3,
            generations: 5,
            clean: true,
            segment_bytes: 256 << 20,
            capacity: 200 << 30,
            index: "run".into(),
            volumes: vec![
                VolumeRecord::new("a"),
                VolumeRecord {
                    dir: "b".into(),
                    draining: true,
                    first_segment: 7,
                    marked: true,
                    unsearched: true,
                },
                VolumeRecord::default(),
            ],
            owner: "host boot".into(),
        }
    }

    #[test]
    fn manifest_round_trips() {
        assert_eq!(Manifest::decode(&manifest().encode()).unwrap(), manifest());
    }

    #[test]
    fn flipped_bit_in_any_byte_and_any_cut_are_refused() {
        let good = manifest().encode();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(Manifest::decode(&bad).is_err(), "byte {at}");
            assert!(Manifest::decode(&good[..at]).is_err(), "cut at {at}");
        }
    }

    /// A later build may append fields to a volume's entry and to the body.
    #[test]
    fn appended_fields_are_ignored() {
        let plain = Manifest { volumes: Vec::new(), ..manifest() };
        let sealed = plain.encode();
        let mut body = unseal(MAGIC, "store", &sealed).unwrap().to_vec();
        let count = body.len() - 4;
        body[count] = 1;
        let mut entry = manifest().volumes[1].encode();
        entry.u64(77);
        let mut writer = Writer::new();
        writer.raw(&body).blob(entry.as_slice()).u64(99);
        let longer = Manifest::decode(&seal(MAGIC, writer.as_slice())).unwrap();
        assert_eq!(longer, Manifest { volumes: vec![manifest().volumes[1].clone()], ..plain });
    }
}
