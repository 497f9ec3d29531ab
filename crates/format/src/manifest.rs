//! The manifest: identity and layout of a store.

use crate::wire::{Reader, Writer};
use crate::{Error, FORMAT_VERSION, Result, checksum};
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"RTRNMANI";

/// A directory of segments.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct VolumeRecord {
    /// Relative to the store's directory, or absolute. Empty if the volume is retired; its number
    /// is not used again.
    pub dir: String,
    /// No new run is placed in the volume, and it is retired once its segments are removed.
    pub draining: bool,
    /// The lowest number that new segments may get. Segments with lower numbers may have been
    /// removed, and processes may still have them open.
    pub first_segment: u32,
    /// The directory carries this volume's [`VolumeMarker`](crate::VolumeMarker). If `marked` is
    /// set and the marker is missing, the volume's file system is probably not mounted.
    pub marked: bool,
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

    /// Whether runs are placed in the volume.
    #[must_use]
    pub fn is_active(&self) -> bool {
        !self.is_retired() && !self.draining
    }
}

/// The identity and layout of a store. The file is replaced as a whole (new file, rename), among
/// others at every open and clean close.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// Drawn at random when the store was created. Ties segments to their store.
    pub uuid: [u8; 16],
    /// Number of owners so far; zero while the store is being created.
    pub owner_epoch: u32,
    /// Upper half of the next owner's generations, minus one. Increases with every owner, and
    /// whenever an owner has used up the lower half, so that no generation is used twice.
    pub generations: u32,
    /// The last owner closed the store, and all changes were durable then. If not, reads of the
    /// store's files may return bytes that are in the page cache and never reach the disk, and
    /// writes of that owner may still be in flight.
    pub clean: bool,
    /// Length of a segment file in bytes.
    pub segment_bytes: u64,
    /// The limit of allocated bytes, segments and metadata together.
    pub capacity: u64,
    /// Name of the index backend.
    pub index: String,
    /// The volumes. A volume's position in this list is its number.
    pub volumes: Vec<VolumeRecord>,
    /// Host and boot of the last owner, for diagnostics.
    pub owner: String,
}

impl Manifest {
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

    /// Encodes the record: magic, version, length, body, CRC-64 of all preceding bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Writer::new();
        body.raw(&self.uuid)
            .u32(self.owner_epoch)
            .u64(self.segment_bytes)
            .u64(self.capacity)
            .blob(self.index.as_bytes())
            .u32(self.volumes.len() as u32);
        for volume in &self.volumes {
            body.blob(volume.dir.as_bytes());
        }
        body.blob(self.owner.as_bytes());
        for volume in &self.volumes {
            body.u8(u8::from(volume.draining)).u32(volume.first_segment);
        }
        body.u32(self.generations).u8(u8::from(self.clean));
        for volume in &self.volumes {
            body.u8(u8::from(volume.marked));
        }
        seal(MAGIC, body.as_slice())
    }

    /// Whether `bytes` are a manifest, perhaps of another format or damaged.
    #[must_use]
    pub fn recognize(bytes: &[u8]) -> bool {
        bytes.starts_with(MAGIC)
    }

    /// Decodes what [`Manifest::encode`] wrote.
    ///
    /// # Errors
    /// `Invalid` if the file is not a manifest, or its version is unsupported; `Fatal` if the
    /// manifest is damaged.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let damaged = |error: Error| Error::fatal("the manifest is damaged").because(error);
        let body = unseal(MAGIC, "store", bytes)?;
        (|| {
            let mut reader = Reader::new(body);
            let mut manifest = Self {
                uuid: reader.array()?,
                owner_epoch: reader.u32()?,
                generations: 0,
                clean: false,
                segment_bytes: reader.u64()?,
                capacity: reader.u64()?,
                index: reader.text()?,
                volumes: Vec::new(),
                owner: String::new(),
            };
            for _ in 0..reader.u32()? {
                manifest.volumes.push(VolumeRecord::new(reader.text()?));
            }
            manifest.owner = reader.text()?;
            if reader.remaining() > 0 {
                for volume in &mut manifest.volumes {
                    volume.draining = reader.u8()? != 0;
                    volume.first_segment = reader.u32()?;
                }
            }
            if reader.remaining() > 0 {
                manifest.generations = reader.u32()?;
                manifest.clean = reader.u8()? != 0;
                for volume in &mut manifest.volumes {
                    volume.marked = reader.u8()? != 0;
                }
            }
            // Earlier builds used the owner epoch as the upper half of generations.
            manifest.generations = manifest.generations.max(manifest.owner_epoch);
            Ok(manifest)
        })()
        .map_err(damaged)
    }
}

/// Encodes a whole-file record: magic (8), version `u32`, length `u32`, body, CRC-64.
#[must_use]
pub fn seal(magic: &[u8; 8], body: &[u8]) -> Vec<u8> {
    let mut writer = Writer::new();
    writer.raw(magic).u32(FORMAT_VERSION).blob(body);
    let sum = checksum(writer.as_slice());
    writer.u64(sum);
    writer.into_vec()
}

/// Decodes a record of [`seal`] and returns its body. `what` names the kind of file in errors.
///
/// # Errors
/// `Invalid` if the magic or the version differs; `Fatal` if the record is damaged.
pub fn unseal<'a>(magic: &[u8; 8], what: &str, bytes: &'a [u8]) -> Result<&'a [u8]> {
    let damaged = || Error::fatal(format!("the {what} file is damaged")).with("bytes", bytes.len());
    let mut reader = Reader::new(bytes);
    let found: [u8; 8] = reader.array().map_err(|_| damaged())?;
    if &found != magic {
        return Err(Error::invalid(format!(
            "this is not a Ritornello {what}: name an empty or new directory"
        )));
    }
    let version = reader.u32().map_err(|_| damaged())?;
    if version != FORMAT_VERSION {
        return Err(Error::invalid(format!(
            "this {what} is of format {version}, and this Ritornello reads format \
             {FORMAT_VERSION}: use the version that wrote it, or another directory"
        )));
    }
    let body = reader.blob().map_err(|_| damaged())?;
    let stored = reader.u64().map_err(|_| damaged())?;
    let covered = &bytes[..bytes.len() - reader.remaining() - 8];
    if stored == checksum(covered) { Ok(body) } else { Err(damaged()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

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
                VolumeRecord { dir: "b".into(), draining: true, first_segment: 7, marked: true },
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
    fn every_flipped_bit_and_every_cut_is_refused() {
        let good = manifest().encode();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(Manifest::decode(&bad).is_err(), "byte {at}");
            assert!(Manifest::decode(&good[..at]).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn other_version_is_refused_with_its_number() {
        let mut other = manifest().encode();
        other[8] = 9;
        let error = Manifest::decode(&other).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("format 9"), "{error}");
    }
}
