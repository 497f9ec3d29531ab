//! The messages on the socket of a store.
//!
//! The first message in each direction follows a [`crate::greeting`]. All messages are the same in
//! the versions that this build speaks. Payload never passes through the socket.

use crate::keys::{Keys, as_bytes, as_optional_bytes};
use crate::owner_epoch::OwnerEpoch;
use ritornello_format::{Error, ErrorKind, FORMAT_VERSION, Scope, ScopeSettings, ScopeSlot};
use ritornello_store::{
    CapacityChange, CatalogStats, Committed, KeyListing, LeaseNumber, Leased, Located,
    ReserveRequest, Reserved, ScopeListing, ScopeRef, StoreReopening,
};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::time::Duration;

/// Maximum time that an owner lets a request wait for space.
pub(crate) const RESERVE_TIMEOUT_MAX: Duration = Duration::from_secs(600);

/// A client's first message, after the greeting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// The format version that the client writes.
    pub(crate) format: u32,
    /// The client's name, see [`crate::presence`].
    pub(crate) name: String,
    /// The client's process id, for diagnostics.
    pub(crate) pid: u32,
    /// Whether this is the first connection under the name. Later connections join the client. They
    /// are refused if the client is no longer connected, because its leases and reservations ended
    /// with it.
    pub(crate) first: bool,
}

impl Hello {
    /// The hello of a client with this name.
    pub(crate) fn new(name: &str, first: bool) -> Self {
        Self { format: FORMAT_VERSION, name: name.to_owned(), pid: std::process::id(), first }
    }
}

/// The reply to a hello.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum HelloReply {
    /// The client is admitted, in this owner's epoch.
    Granted(OwnerEpoch),
    /// The client to join is no longer connected: the process must connect under a new name.
    Gone,
    /// The client is refused. A fault of kind `Miss` says that the owner reopens the store after
    /// the failure in its text.
    Refused(WireError),
}

/// A request, with one variant for each call of [`ritornello_store::Catalog`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Request<'a> {
    Resolve {
        scope: Cow<'a, Scope>,
        create: bool,
    },
    Probe {
        scope: ScopeRef,
        #[serde(borrow)]
        keys: Keys<'a>,
    },
    Lease {
        scopes: Cow<'a, [ScopeRef]>,
        #[serde(borrow)]
        keys: Keys<'a>,
        ttl: Duration,
    },
    /// Has no response: a client does not wait when it releases a lease.
    Release {
        lease: LeaseNumber,
    },
    BeginRead {
        scope: ScopeRef,
        #[serde(borrow)]
        keys: Keys<'a>,
    },
    Exists {
        scope: ScopeRef,
        #[serde(borrow)]
        keys: Keys<'a>,
    },
    Reserve {
        scope: ScopeRef,
        #[serde(borrow)]
        keys: Keys<'a>,
        #[serde(borrow, serialize_with = "as_optional_bytes")]
        parent: Option<&'a [u8]>,
        reserve_request: Cow<'a, ReserveRequest>,
    },
    Commit {
        reservation: u64,
        written: Cow<'a, [Option<u64>]>,
    },
    Abort {
        reservation: u64,
    },
    ReportCorruption {
        scope: ScopeRef,
        #[serde(borrow, serialize_with = "as_bytes")]
        key: &'a [u8],
        generation: u64,
        #[serde(borrow)]
        reason: &'a str,
    },
    Touch {
        scope: ScopeRef,
        #[serde(borrow)]
        keys: Keys<'a>,
    },
    Delete {
        scope: ScopeRef,
        #[serde(borrow)]
        keys: Keys<'a>,
    },
    DropScope {
        scope: ScopeRef,
    },
    Configure {
        scope: ScopeRef,
        settings: ScopeSettings,
    },
    Scopes {
        from: ScopeSlot,
    },
    Keys {
        scope: ScopeRef,
        after: u64,
        limit: u32,
    },
    ChangeCapacity {
        change: Cow<'a, CapacityChange>,
    },
    Clear,
    Flush,
    Stats,
}

/// A response.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Response {
    /// Answers `Resolve`.
    Scope(Option<ScopeRef>),
    /// A number of pages.
    Count(usize),
    /// Answers `Lease`.
    Leased(Leased),
    /// Answers `BeginRead`.
    Located(Located),
    /// Answers `Exists`.
    Exists(Vec<bool>),
    /// Answers `Reserve`.
    Reserved(Reserved),
    /// Answers `Commit`.
    Committed(Committed),
    /// Answers `Scopes`.
    Scopes(Vec<ScopeListing>),
    /// Answers `Keys`.
    Keys(KeyListing),
    /// Answers requests that have no other response.
    Done,
    /// Answers `Stats`.
    Stats(Box<CatalogStats>),
    /// The call failed.
    Failed(WireError),
}

/// An error on the wire.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WireError {
    kind: Kind,
    text: String,
}

/// [`ErrorKind`] on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Kind {
    Invalid,
    Retry,
    Miss,
    Fatal,
    Closed,
}

impl WireError {
    /// Whether the error says that the owner is closing.
    pub(crate) fn is_closed(&self) -> bool {
        self.kind == Kind::Closed
    }

    /// Returns the error for a refused hello.
    pub(crate) fn refusal(self) -> Error {
        if self.kind == Kind::Miss { StoreReopening::error(&self.text) } else { self.into() }
    }
}

impl WireError {
    /// The wire form of `error`.
    pub(crate) fn about(error: &Error) -> Self {
        let kind = match error.kind() {
            ErrorKind::Invalid => Kind::Invalid,
            ErrorKind::Retry => Kind::Retry,
            ErrorKind::Miss => Kind::Miss,
            ErrorKind::Fatal => Kind::Fatal,
            ErrorKind::Closed => Kind::Closed,
        };
        Self { kind, text: error.to_string() }
    }
}

impl From<Error> for WireError {
    fn from(error: Error) -> Self {
        Self::about(&error)
    }
}

impl From<WireError> for Error {
    fn from(fault: WireError) -> Self {
        let kind = match fault.kind {
            Kind::Invalid => ErrorKind::Invalid,
            Kind::Retry => ErrorKind::Retry,
            Kind::Miss => ErrorKind::Miss,
            Kind::Fatal => ErrorKind::Fatal,
            Kind::Closed => ErrorKind::Closed,
        };
        Self::new(kind, fault.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::decode;
    use crate::greeting::{First, NEWEST, OLDEST};
    use crate::keys::Flattened;
    use ritornello_format::ScopeId;

    const SCOPE: ScopeRef = ScopeRef {
        id: ScopeId([3; 16]),
        slot: ScopeSlot(1),
        page_bytes: 4096,
        chained: true,
        codec: 0,
    };

    fn encoded(message: &impl Serialize) -> Vec<u8> {
        postcard::to_stdvec(message).unwrap()
    }

    #[test]
    fn damaged_requests_never_panic() {
        let (short, long) = ([1u8; 8], [2u8; 64]);
        let flat = Flattened::new(&[&short, &long]).unwrap();
        let good = encoded(&Request::Reserve {
            scope: SCOPE,
            keys: flat.as_keys(),
            parent: Some(&long),
            reserve_request: Cow::Owned(ReserveRequest {
                timeout: Duration::from_secs(1),
                ..ReserveRequest::default()
            }),
        });
        for at in 0..good.len() {
            assert!(decode::<Request<'_>>(&good[..at]).is_err(), "cut at {at}");
            for bit in 0..8 {
                let mut bad = good.clone();
                bad[at] ^= 1 << bit;
                if let Ok(Request::Reserve { keys, .. }) = decode(&bad) {
                    let _ = keys.split();
                }
            }
        }
    }

    /// Messages of a connection between a client and an owner that know only version 7.
    #[test]
    fn version_7_messages_match_recordings() {
        let (spoken, peer) = (OLDEST..=NEWEST, "a peer");
        let client = messages(include_bytes!("../tests/recorded/client-7.bin"));
        let owner = messages(include_bytes!("../tests/recorded/owner-7.bin"));
        let hello = First::<Hello>::read(client[0], spoken.clone(), peer).unwrap();
        assert_eq!((hello.version, encoded(&hello)), (7, client[0].to_vec()));
        let entry = First::<HelloReply>::read(owner[0], spoken, peer).unwrap();
        assert_eq!((entry.version, encoded(&entry)), (7, owner[0].to_vec()));
        for message in &client[1..] {
            assert_eq!(encoded(&decode::<Request<'_>>(message).unwrap()), *message);
        }
        for message in &owner[1..] {
            assert_eq!(encoded(&decode::<Response>(message).unwrap()), *message);
        }
        assert!(client.len() > 20 && owner.len() > 15);
    }

    fn messages(mut recorded: &[u8]) -> Vec<&[u8]> {
        let mut messages = Vec::new();
        while let Some((length, rest)) = recorded.split_first_chunk() {
            let (message, rest) = rest.split_at(u32::from_le_bytes(*length) as usize);
            messages.push(message);
            recorded = rest;
        }
        messages
    }

    #[test]
    fn errors_keep_kind_and_text() {
        let error = Error::fatal("broken").with("disk", 3).because(std::io::Error::other("why"));
        let text = error.to_string();
        let back = Error::from(WireError::from(error));
        assert_eq!((back.kind(), back.to_string()), (ErrorKind::Fatal, text));
    }
}
