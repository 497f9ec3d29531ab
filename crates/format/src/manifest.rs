//! The manifest: what a store is, apart from what is in it.

use crate::wire::{Reader, Writer};
use crate::{Error, FORMAT_VERSION, Result, checksum};

const MAGIC: &[u8; 8] = b"RTRNMANI";

/// What a directory holds, and how. Rewritten whole (new file, rename) at every open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// Random, drawn when the store was made: ties segments to their store.
    pub uuid: [u8; 16],
    /// Counts owners: part of every generation, so none is ever used twice.
    pub epoch: u32,
    /// Bytes a segment file.
    pub segment_bytes: u64,
    /// The budget: segments and metadata together, in allocated bytes.
    pub capacity: u64,
    /// Name of the index backend.
    pub index: String,
    /// Directories of the segments. The position is the volume number.
    pub volumes: Vec<String>,
    /// Host and boot of the last owner, for people who look.
    pub owner: String,
}

impl Manifest {
    /// The record: magic, version, length, body, CRC-64 of everything before it.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Writer::new();
        body.raw(&self.uuid)
            .u32(self.epoch)
            .u64(self.segment_bytes)
            .u64(self.capacity)
            .blob(self.index.as_bytes())
            .u32(self.volumes.len() as u32);
        for volume in &self.volumes {
            body.blob(volume.as_bytes());
        }
        body.blob(self.owner.as_bytes());
        seal(MAGIC, body.as_slice())
    }

    /// Reads what [`Manifest::encode`] wrote.
    ///
    /// # Errors
    /// `Invalid` if it is no manifest or one of another version, `Fatal` if it is damaged.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let damaged = |error: Error| {
            Error::fatal("the manifest is damaged: restore MANIFEST from a copy, or start afresh")
                .because(error)
        };
        let body = unseal(MAGIC, "store", bytes)?;
        (|| {
            let mut reader = Reader::new(body);
            let mut manifest = Self {
                uuid: reader.array()?,
                epoch: reader.u32()?,
                segment_bytes: reader.u64()?,
                capacity: reader.u64()?,
                index: reader.text()?,
                volumes: Vec::new(),
                owner: String::new(),
            };
            for _ in 0..reader.u32()? {
                manifest.volumes.push(reader.text()?);
            }
            manifest.owner = reader.text()?;
            Ok(manifest)
        })()
        .map_err(damaged)
    }
}

/// Wraps `body` as a whole-file record: magic (8), version `u32`, length `u32`, body, CRC-64.
#[must_use]
pub fn seal(magic: &[u8; 8], body: &[u8]) -> Vec<u8> {
    let mut writer = Writer::new();
    writer.raw(magic).u32(FORMAT_VERSION).blob(body);
    let sum = checksum(writer.as_slice());
    writer.u64(sum);
    writer.into_vec()
}

/// The body of what [`seal`] made. `what` names the file to the reader of an error.
///
/// # Errors
/// `Invalid` for another magic or version, `Fatal` for damage.
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
            epoch: 3,
            segment_bytes: 256 << 20,
            capacity: 200 << 30,
            index: "run".into(),
            volumes: vec!["a".into(), "b".into()],
            owner: "host boot".into(),
        }
    }

    #[test]
    fn it_comes_back() {
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
    fn another_version_is_refused_by_name() {
        let mut other = manifest().encode();
        other[8] = 9;
        let error = Manifest::decode(&other).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("format 9"), "{error}");
    }
}
