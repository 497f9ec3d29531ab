//! Whole-file records: files that are replaced as a whole, and the heads of files to which records
//! are appended.
//!
//! | bytes | field |
//! |---|---|
//! | 8 | magic |
//! | 4 | format version |
//! | 4 | features |
//! | 4 | length of the body |
//! | n | body |
//! | 8 | CRC-64 of all preceding bytes |
//!
//! The layout is the same in version 1 and all later versions, so that a reader of any version can
//! distinguish a file of another version from a damaged file.

use crate::version::check_version;
use crate::wire::{Reader, Writer};
use crate::{Error, FORMAT_VERSION, Result, checksum};

/// Bytes of a whole-file record without its body.
pub(crate) const SEAL_BYTES: usize = 28;

/// Encodes a whole-file record.
#[must_use]
pub(crate) fn seal(magic: &[u8; 8], body: &[u8]) -> Vec<u8> {
    let mut writer = Writer::new();
    writer.raw(magic).u32(FORMAT_VERSION).u32(0).blob(body);
    let sum = checksum(writer.as_slice());
    writer.u64(sum);
    writer.into_vec()
}

/// Decodes a record of [`seal`] and returns its body; more bytes may follow the record. `what`
/// names the kind of file in errors. The checksum is verified before the version and the
/// features: a flipped bit in them is damage, not another version.
///
/// # Errors
/// `Invalid` if the magic differs, or if the record is intact and of another version or with
/// unknown features; `Fatal` if the record is damaged.
pub(crate) fn unseal<'a>(magic: &[u8; 8], what: &str, bytes: &'a [u8]) -> Result<&'a [u8]> {
    let damaged = || Error::fatal(format!("the {what} file is damaged")).with("bytes", bytes.len());
    let mut reader = Reader::new(bytes);
    let found: [u8; 8] = reader.array().map_err(|_| damaged())?;
    if &found != magic {
        return Err(Error::invalid(format!(
            "this is not a Ritornello {what}: name an empty or new directory"
        )));
    }
    let version = reader.u32().map_err(|_| damaged())?;
    // Records of version 0 lack the field `features`.
    let features = if version == 0 { Ok(0) } else { reader.u32() }.map_err(|_| damaged())?;
    let body = reader.blob().map_err(|_| damaged())?;
    let stored = reader.u64().map_err(|_| damaged())?;
    let covered = &bytes[..bytes.len() - reader.remaining() - 8];
    if stored != checksum(covered) {
        return Err(damaged());
    }
    check_version(what, version, features)?;
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    const MAGIC: &[u8; 8] = b"RTRNTEST";

    /// A file with the given version and features, and a valid checksum.
    fn record(version: u32, features: u32) -> Vec<u8> {
        let mut writer = Writer::new();
        writer.raw(MAGIC).u32(version).u32(features).blob(b"body");
        let sum = checksum(writer.as_slice());
        writer.u64(sum);
        writer.into_vec()
    }

    #[test]
    fn other_versions_are_refused_with_both_numbers() {
        assert_eq!(unseal(MAGIC, "store", &record(1, 0)).unwrap(), b"body");
        for (version, remedy) in [(2, "use a newer Ritornello"), (u32::MAX, "newer")] {
            let error = unseal(MAGIC, "store", &record(version, 0)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            let text = error.to_string();
            let both = format!("is of format {version}, and this Ritornello reads format 1: ");
            assert!(text.contains(&both) && text.contains(remedy), "{text}");
        }
    }

    #[test]
    fn unknown_features_are_refused_with_their_bits() {
        let error = unseal(MAGIC, "store", &record(1, 6)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("features (0x6) of format 1"), "{error}");
    }

    /// A flipped bit must count as damage (`Fatal`), for which an opening reads the manifest's
    /// copy, and not as another version (`Invalid`), which an opening refuses.
    #[test]
    fn flipped_version_or_feature_is_damage() {
        for at in 8..16 {
            for bit in 0..8 {
                let mut bad = record(1, 0);
                bad[at] ^= 1 << bit;
                let error = unseal(MAGIC, "store", &bad).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Fatal, "bit {bit} of byte {at}");
            }
        }
    }
}
