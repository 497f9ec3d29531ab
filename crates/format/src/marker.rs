//! The marker of a volume: the file that names the store and volume of a directory.

use crate::whole_file::{seal, unseal};
use crate::wire::{Reader, Writer};
use crate::{Error, Result};

const MAGIC: &[u8; 8] = b"RTRNVOLU";

/// The content of the file [`VolumeMarker::FILE`], which marks a directory as a volume of a store.
///
/// A file system that is not mounted leaves an empty mount point. Without the marker, an empty
/// mount point would look like a volume that has lost all its segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeMarker {
    /// The store: [`Manifest::uuid`](crate::Manifest::uuid).
    pub store: [u8; 16],
    /// The volume's number in that store.
    pub volume: u8,
}

impl VolumeMarker {
    /// Name of the file.
    pub const FILE: &'static str = "VOLUME";

    /// Encodes the file: a whole-file record (module `whole_file`).
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Writer::new();
        body.raw(&self.store).u8(self.volume);
        seal(MAGIC, body.as_slice())
    }

    /// Decodes what [`VolumeMarker::encode`] wrote.
    ///
    /// # Errors
    /// `Invalid` if the marker is of another version or with unknown features; `Fatal` if it is
    /// damaged, or the file is not a marker.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let damaged = |error: Error| Error::fatal("the volume marker is damaged").because(error);
        if !bytes.starts_with(MAGIC) {
            return Err(damaged(Error::invalid("the file has another magic number")));
        }
        let body = unseal(MAGIC, "volume marker", bytes)?;
        let mut reader = Reader::new(body);
        let store = reader.array().map_err(damaged)?;
        let volume = reader.u8().map_err(damaged)?;
        Ok(Self { store, volume })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marker_round_trips_and_damage_is_refused() {
        let marker = VolumeMarker { store: [9; 16], volume: 3 };
        let good = marker.encode();
        assert_eq!(VolumeMarker::decode(&good).unwrap(), marker);
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(VolumeMarker::decode(&bad).is_err(), "byte {at}");
            assert!(VolumeMarker::decode(&good[..at]).is_err(), "cut at {at}");
        }
    }
}
