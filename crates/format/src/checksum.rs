//! CRC-64/NVME: plain for the store's own records, seeded with key, generation and slice number for
//! payload.

use crc_fast::{CrcAlgorithm, Digest};

/// CRC-64/NVME of `bytes`. Protects the store's records; payload has [`SliceChecksum`].
#[must_use]
pub fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::checksum(CrcAlgorithm::Crc64Nvme, bytes)
}

/// The checksum of one slice of a page, updated fragment by fragment.
///
/// The checksum is seeded with the page's key, the generation of its run and the slice's number, so
/// that the intact bytes of another page, run or slice do not pass.
#[derive(Debug)]
pub struct SliceChecksum(Digest);

impl SliceChecksum {
    /// Starts the checksum of slice `slice` of the page `key` in the run of `generation`.
    #[must_use]
    pub fn new(key: &[u8], generation: u64, slice: u16) -> Self {
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        digest.update(&generation.to_le_bytes());
        digest.update(&slice.to_le_bytes());
        digest.update(&(key.len() as u16).to_le_bytes());
        digest.update(key);
        Self(digest)
    }

    /// Adds the next bytes of the slice.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The CRC register after all bytes added, before the final inversion of CRC-64/NVME. With
    /// [`SliceChecksum::resume`], another implementation of CRC-64/NVME can add bytes.
    #[must_use]
    pub fn register(&self) -> u64 {
        self.0.get_state()
    }

    /// Continues a checksum from the value of [`SliceChecksum::register`].
    #[must_use]
    pub fn resume(register: u64) -> Self {
        Self(Digest::new_with_init_state(CrcAlgorithm::Crc64Nvme, register))
    }

    /// The checksum of all bytes added.
    #[must_use]
    pub fn finish(self) -> u64 {
        self.0.finalize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_has_the_published_check_value() {
        assert_eq!(checksum(b"123456789"), 0xae8b_1486_0a79_9888);
    }

    #[test]
    fn resumed_checksum_equals_uninterrupted_checksum() {
        let mut whole = SliceChecksum::new(b"key-0001", 7, 3);
        whole.update(b"abc");
        let mut resumed = SliceChecksum::resume(whole.register());
        whole.update(b"def");
        resumed.update(b"def");
        assert_eq!(resumed.finish(), whole.finish());
    }

    #[test]
    fn slice_checksum_depends_on_key_generation_and_slice_number() {
        let of = |key: &[u8], generation, slice, bytes: &[&[u8]]| {
            let mut sum = SliceChecksum::new(key, generation, slice);
            bytes.iter().for_each(|part| sum.update(part));
            sum.finish()
        };
        let base = of(b"key-0001", 7, 0, &[b"abcdef"]);
        assert_eq!(base, of(b"key-0001", 7, 0, &[b"abc", b"", b"def"]));
        assert_ne!(base, of(b"key-0002", 7, 0, &[b"abcdef"]));
        assert_ne!(base, of(b"key-0001", 8, 0, &[b"abcdef"]));
        assert_ne!(base, of(b"key-0001", 7, 1, &[b"abcdef"]));
    }
}
