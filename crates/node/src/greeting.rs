//! Negotiates a protocol version that both processes speak.
//!
//! ```text
//! magic "RTRN" │ version, u32 │ oldest, u32 │ body
//! └─ fixed in all versions ──┘ └ from 8 on ┘ └ laid out as the version says
//! ```
//!
//! A client says hello in its newest version. An owner that speaks this version replies in it. Any
//! other owner replies in its newest version; a client that speaks that version connects again and
//! says hello in it. Both peers therefore use the newest version that they have in common, even
//! if one of them knows only version 7, whose greeting names no oldest version.

use crate::channel::decode;
use ritornello_format::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Serialize, Serializer};
use std::error::Error as StdError;
use std::fmt;
use std::ops::RangeInclusive;

/// The newest version that this build speaks. The version increases whenever a message changes. The
/// messages of a version never change: tests compare them with recordings in
/// `crates/node/tests/recorded`.
pub(crate) const NEWEST: u32 = 8;
/// The oldest version that this build speaks, as owner and as client.
pub(crate) const OLDEST: u32 = 7;
/// First version whose greeting also says the oldest version that its sender speaks.
const SAYS_OLDEST: u32 = 8;
const MAGIC: [u8; 4] = *b"RTRN";
/// How errors name the owner.
pub(crate) const OWNER: &str = "the process that owns this store";

/// The first message of a connection in one direction: a hello or its reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct First<T> {
    /// The version of the body and of all later messages.
    pub(crate) version: u32,
    /// The hello or its reply.
    pub(crate) body: T,
}

impl<T: Serialize> Serialize for First<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let version = self.version.to_le_bytes();
        if self.version >= SAYS_OLDEST {
            (MAGIC, version, OLDEST.to_le_bytes(), &self.body).serialize(serializer)
        } else {
            (MAGIC, version, &self.body).serialize(serializer)
        }
    }
}

impl<T: DeserializeOwned> First<T> {
    /// Reads a first message. `peer` names its sender in errors.
    ///
    /// # Errors
    /// `Invalid` for another protocol or a malformed body; `Retry`, caused by [`OtherVersion`], if
    /// the version is not among `spoken`.
    pub(crate) fn read(
        message: &[u8],
        spoken: RangeInclusive<u32>,
        peer: &'static str,
    ) -> Result<Self> {
        let foreign = || Error::invalid(format!("{peer} does not speak Ritornello's protocol"));
        let (magic, rest) = message.split_first_chunk::<4>().unwrap_or((&[0; 4], &[]));
        let Some((version, rest)) = rest.split_first_chunk().filter(|_| *magic == MAGIC) else {
            return Err(foreign());
        };
        let version = u32::from_le_bytes(*version);
        let (oldest, body) = if version >= SAYS_OLDEST {
            let Some((oldest, body)) = rest.split_first_chunk() else { return Err(foreign()) };
            (u32::from_le_bytes(*oldest).min(version), body)
        } else {
            (version, rest)
        };
        if !spoken.contains(&version) {
            return Err(OtherVersion { oldest, newest: version }.error(peer));
        }
        Ok(Self { version, body: decode(body)? })
    }
}

/// The versions that a peer speaks. Serves as the cause of the error for a first message in a
/// version that the reader does not accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OtherVersion {
    oldest: u32,
    newest: u32,
}

impl OtherVersion {
    /// The versions that the peer speaks, if a mismatch caused `error`.
    pub(crate) fn of(error: &Error) -> Option<Self> {
        error.source().and_then(|cause| cause.downcast_ref()).copied()
    }

    /// The newest version that this build and the peer have in common.
    pub(crate) fn in_common(self) -> Option<u32> {
        let newest = self.newest.min(NEWEST);
        (newest >= self.oldest.max(OLDEST)).then_some(newest)
    }

    /// The error for a peer with these versions.
    pub(crate) fn error(self, peer: &'static str) -> Error {
        let advice = if self.newest > NEWEST {
            "runs a newer version of Ritornello: restart this process with that version"
        } else {
            "runs an older version of Ritornello: restart it with the version of this process"
        };
        Error::retry(format!("{peer} {advice}; nothing is hit or stored until then"))
            .with("protocol", span(OLDEST, NEWEST))
            .with("theirs", span(self.oldest, self.newest))
            .because(self)
    }
}

fn span(oldest: u32, newest: u32) -> String {
    if oldest == newest { newest.to_string() } else { format!("{oldest} to {newest}") }
}

impl fmt::Display for OtherVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the two processes have no protocol version in common")
    }
}

impl StdError for OtherVersion {}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_format::ErrorKind;

    const PEER: &str = "the owner";

    fn written(version: u32) -> Vec<u8> {
        postcard::to_stdvec(&First { version, body: 7u8 }).unwrap()
    }

    #[test]
    fn first_message_starts_the_same_in_versions_7_and_8() {
        assert_eq!(written(7), b"RTRN\x07\0\0\0\x07");
        assert_eq!(written(8), b"RTRN\x08\0\0\0\x07\0\0\0\x07");
        for version in [7, 8] {
            let first = First::<u8>::read(&written(version), OLDEST..=NEWEST, PEER).unwrap();
            assert_eq!(first, First { version, body: 7 });
        }
        for other in [&b"GET / HTTP/1.1"[..], b"RTRN", b"", b"RTRN\x08\0\0\0\x01"] {
            let error = First::<u8>::read(other, OLDEST..=NEWEST, PEER).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        }
    }

    #[test]
    fn peers_agree_on_the_newest_common_version() {
        let met = |oldest, newest| OtherVersion { oldest, newest }.in_common();
        assert_eq!(met(7, 7), Some(7));
        assert_eq!(met(7, 8), Some(8));
        assert_eq!(met(8, 20), Some(NEWEST));
        assert_eq!(met(1, 6), None);
        assert_eq!(met(NEWEST + 1, NEWEST + 2), None);
    }

    #[test]
    fn error_of_a_version_mismatch_says_which_side_to_restart() {
        let read = |version: u32| {
            let message = [b"RTRN", &version.to_le_bytes()[..], &version.to_le_bytes()].concat();
            let error = First::<u8>::read(&message, OLDEST..=NEWEST, PEER).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Retry);
            assert!(OtherVersion::of(&error).is_some());
            error.to_string()
        };
        let newer = read(NEWEST + 1);
        assert!(newer.contains("restart this process with that version"), "{newer}");
        assert!(newer.contains("protocol=7 to 8, theirs=9"), "{newer}");
        let older = read(6);
        assert!(older.contains("restart it with the version of this process"), "{older}");
        assert!(older.contains("theirs=6"), "{older}");
    }
}
