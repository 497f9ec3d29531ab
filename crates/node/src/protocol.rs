//! The first messages on the socket of a store; [`ritornello_store::Request`] and
//! [`ritornello_store::Response`] follow.
//!
//! The first message in each direction follows a [`crate::greeting`]. A message has the same layout
//! in each protocol version that this build speaks, if the version has the message. The bytes of
//! pages never pass through the socket.

use ritornello_format::FORMAT_VERSION;
use ritornello_store::WireError;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Maximum time that an owner lets a request wait for space.
pub(crate) const RESERVE_TIMEOUT_MAX: Duration = Duration::from_secs(600);

/// First version in which an empty name in a hello denotes an observer. No client has an empty
/// name, and in version 7 an owner refuses an empty name, because no locked file has it.
pub(crate) const OBSERVERS_SINCE: u32 = 8;

/// First version in which clients send reports ([`crate::reports`]).
pub(crate) const REPORTS_SINCE: u32 = 8;

/// First version in which an owner explains hits and misses, and lists decisions.
pub(crate) const EXPLAINS_SINCE: u32 = 8;

/// A client's first message, after the greeting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// The version of the store's format ([`FORMAT_VERSION`]) that the client writes.
    pub(crate) format: u32,
    /// The client's name, see [`crate::presence`]; empty for an observer ([`OBSERVERS_SINCE`]),
    /// which may send one request: `Stats`.
    pub(crate) name: String,
    /// The client's process id, for diagnostics.
    pub(crate) pid: u32,
    /// Whether this is the first connection under the name. Later connections join the client. The
    /// owner refuses them if the client is no longer connected, because its leases have ended, and
    /// its reservations cannot be committed.
    pub(crate) first: bool,
}

impl Hello {
    /// The hello of a client with this name.
    pub(crate) fn new(name: &str, first: bool) -> Self {
        Self { format: FORMAT_VERSION, name: name.to_owned(), pid: std::process::id(), first }
    }

    /// The hello of an observer, for [`OBSERVERS_SINCE`] and later versions.
    pub(crate) fn observer() -> Self {
        Self::new("", true)
    }

    /// Whether this hello in `version` is of an observer.
    pub(crate) fn is_observer(&self, version: u32) -> bool {
        version >= OBSERVERS_SINCE && self.name.is_empty()
    }
}

/// An owner's epoch, as sent to its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OwnerEpoch {
    /// Identity of the store.
    pub(crate) store: [u8; 16],
    /// Number of the epoch: how often the store was opened by an owner, plus 65,536 for each
    /// restore.
    pub(crate) owner: u32,
    /// Whether the previous owner made all changes durable when it closed the store.
    pub(crate) clean: bool,
    /// Whether a put or a delete is durable when it is acknowledged.
    pub(crate) durable: bool,
}

impl OwnerEpoch {
    /// Returns whether it is certain that no put or delete that was acknowledged in epoch `owner`
    /// was lost with the owner of that epoch.
    pub(crate) fn preserves(&self, owner: u32) -> bool {
        owner == self.owner || (self.clean && owner.checked_add(1) == Some(self.owner))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum HelloReply {
    /// The client is admitted, in this owner's epoch.
    Granted(OwnerEpoch),
    /// The client that this connection would join is no longer connected: the process must connect
    /// under a new name.
    Gone,
    /// The client is refused. An error of kind `Miss` says that the owner is reopening the store;
    /// its text is the failure that poisoned the store.
    Refused(WireError),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::decode;
    use crate::greeting::{First, NEWEST, OLDEST};
    use ritornello_format::{Error, ErrorKind};
    use ritornello_store::{Keys, Request, Response};

    fn encoded(message: &impl Serialize) -> Vec<u8> {
        postcard::to_stdvec(message).unwrap()
    }

    /// Messages of a connection between a client and an owner that know only version 7.
    #[test]
    fn version_7_messages_match_recordings() {
        let (spoken, peer) = (OLDEST..=NEWEST, "a peer");
        let client = messages(include_bytes!("../tests/recorded/client-7.bin"));
        let owner = messages(include_bytes!("../tests/recorded/owner-7.bin"));
        let hello = First::<Hello>::read(client[0], spoken.clone(), peer).unwrap();
        assert_eq!((hello.version, encoded(&hello)), (7, client[0].to_vec()));
        let reply = First::<HelloReply>::read(owner[0], spoken, peer).unwrap();
        assert_eq!((reply.version, encoded(&reply)), (7, owner[0].to_vec()));
        for message in &client[1..] {
            assert_eq!(encoded(&decode::<Request<'_>>(message).unwrap()), *message);
        }
        for message in &owner[1..] {
            assert_eq!(encoded(&decode::<Response>(message).unwrap()), *message);
        }
        assert!(client.len() > 20 && owner.len() > 15);
    }

    #[test]
    fn keys_of_any_lengths_round_trip() {
        let (short, long) = ([1u8; 8], [2u8; 64]);
        for keys in [vec![], vec![&long[..]; 3], vec![&short[..], &long[..], &short[..]]] {
            let bytes = encoded(&Keys::Listed(&keys));
            let back: Keys<'_> = decode(&bytes).unwrap();
            assert_eq!(encoded(&back), bytes);
            assert_eq!(*back.list().unwrap(), keys);
        }
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

    #[test]
    fn same_epoch_or_clean_successor_preserves_puts() {
        let epoch = |owner, clean| OwnerEpoch { store: [0; 16], owner, clean, durable: false };
        assert!(epoch(4, false).preserves(4));
        assert!(epoch(5, true).preserves(4));
        assert!(!epoch(5, false).preserves(4));
        assert!(!epoch(6, true).preserves(4));
    }
}
