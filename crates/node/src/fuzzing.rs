//! Socket messages for a fuzzer, compiled only in tests and with the feature `fuzzing`.
//!
//! The first byte of an input selects which of the four kinds of message follows. On the socket no
//! such byte exists: each message's position in the exchange decides its kind.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a fuzzer fails by panicking")]

mod generator;
#[cfg(test)]
mod pinned;

use crate::channel::decode;
use crate::greeting::{First, NEWEST, OLDEST};
use crate::permissions::ClientPermissions;
use crate::protocol::{Hello, HelloReply};
use crate::server::answer;
use generator::Generator;
use ritornello_format::Scope;
use ritornello_store::{Catalog, Keys, Request, ReserveRequest, Response, ScopeRef};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fmt::Debug;

const HELLO: u8 = 0;
const WELCOME: u8 = 1;
const REQUEST: u8 = 2;
const RESPONSE: u8 = 3;
/// Number of bytes by which the encoding of a decoded message may exceed the input: a duration with
/// 10^9 nanoseconds or more decodes to a larger number of seconds, which may take one more byte.
const CARRY: usize = 1;
/// Number of messages generated for each variant of an enum.
const EACH: usize = 4;

/// Returns whether `bytes` decode as this kind of message. If so, asserts that the message is
/// encoded to at most [`CARRY`] bytes more than the input, and, after decoding again, to the same
/// bytes. (Bytes are compared, because a NaN differs from itself.)
macro_rules! is_message {
    ($kind:ty, $bytes:expr) => {
        decode::<$kind>($bytes).is_ok_and(|message| {
            let once = written(&message);
            let again = decode::<$kind>(&once).unwrap();
            assert!(written(&again) == once, "{message:?} is decoded again as {again:?}");
            assert!(
                once.len() <= $bytes.len() + CARRY,
                "{message:?} is encoded to more bytes than the input"
            );
            true
        })
    };
}

/// Like `is_message`, for a hello or its reply, whose encoding is never longer than the input.
fn is_first<T: Serialize + DeserializeOwned + Debug>(bytes: &[u8]) -> bool {
    let read = |bytes: &[u8]| First::<T>::read(bytes, OLDEST..=NEWEST, "a peer");
    read(bytes).is_ok_and(|message| {
        let once = written(&message);
        let again = read(&once).unwrap();
        assert!(written(&again) == once, "{message:?} is decoded again as {again:?}");
        assert!(once.len() <= bytes.len(), "{message:?} is encoded to more bytes than the input");
        true
    })
}

/// Decodes `message` as a peer does. Returns whether it is valid.
///
/// # Panics
/// If a valid message changes when it is encoded and decoded again, or its encoding is longer than
/// the input (for requests and responses, by more than one byte).
#[must_use]
pub fn parse(message: &[u8]) -> bool {
    let Some((kind, bytes)) = message.split_first() else { return false };
    match *kind {
        HELLO => is_first::<Hello>(bytes),
        WELCOME => is_first::<HelloReply>(bytes),
        REQUEST => {
            if let Ok(request) = decode::<Request<'_>>(bytes) {
                let _ = request.keys().map(|keys| keys.list().map(|keys| keys.len()));
            }
            is_message!(Request<'_>, bytes)
        }
        RESPONSE => is_message!(Response, bytes),
        _ => false,
    }
}

/// Handles a request as a server does. Ignores changes of capacity, which would wait for background
/// threads: a fuzzed core has none. Returns whether `message` was handled.
///
/// # Panics
/// If the response changes when it is encoded and decoded again.
pub fn ask(catalog: &dyn Catalog, message: &[u8]) -> bool {
    let Some((&REQUEST, bytes)) = message.split_first() else { return false };
    match decode(bytes) {
        Err(_) | Ok(Request::ChangeCapacity { .. }) => false,
        Ok(request) => {
            if let Some(response) = answer(catalog, &ClientPermissions::default(), request) {
                assert!(is_message!(Response, &written(&response)));
            }
            true
        }
    }
}

/// Returns messages of every variant. Requests name `scope`, whose reference is `known`.
///
/// # Panics
/// Never: all of them can be encoded.
#[must_use]
pub fn messages(scope: &Scope, known: ScopeRef) -> Vec<Vec<u8>> {
    let keys: [&[&[u8]]; 2] = [&[&[1; 16], &[2; 16], &[3; 16]], &[&[1; 8], &[2; 64], &[3; 64]]];
    // A core accepts an empty `page_units`, or one entry per key, each at most the number of units
    // of an unencoded page. Timeouts are zero, so requests do not wait for space.
    let raw = ReserveRequest::default();
    let (page_units, retain_until) = (vec![1; 3], 1 << 33);
    let encoded = ReserveRequest { page_units, slices_per_page: 2, retain_until, ..raw.clone() };
    let known = [
        ("Scope", vec![written(scope)]),
        ("ScopeRef", vec![written(&known)]),
        ("PackedKeys", keys.iter().map(|keys| written(&Keys::Listed(keys))).collect()),
        ("ReserveRequest", vec![written(&raw), written(&encoded)]),
    ];
    let mut messages = Vec::new();
    let mut add = |kind: u8, message: Vec<u8>| messages.push([vec![kind], message].concat());
    let mut generator = Generator::new(&known);
    for version in [OLDEST, NEWEST] {
        let body = Hello::new("0123456789abcdef", true);
        add(HELLO, written(&First { version, body }));
        let make = |from: &mut Generator<'_>| HelloReply::deserialize(from).ok();
        generator.each_variant(EACH, make, |body| add(WELCOME, written(&First { version, body })));
    }
    generator.each_variant(
        EACH,
        |from| Request::deserialize(from).ok(),
        |request| add(REQUEST, written(&request)),
    );
    generator.each_variant(
        EACH,
        |from| Response::deserialize(from).ok(),
        |response| add(RESPONSE, written(&response)),
    );
    messages
}

fn written(message: &impl Serialize) -> Vec<u8> {
    postcard::to_stdvec(message).unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_format::{ScopeId, ScopeSlot};
    use ritornello_medium::SimDisk;
    use ritornello_store::{
        ClientId, DECISION_KEYS_MAX, Decision, Options, RequestExplanation, StoreCore,
    };
    use std::collections::BTreeSet;
    use std::path::Path;
    use std::sync::Arc;

    fn all() -> Vec<Vec<u8>> {
        let (id, slot) = (ScopeId([3; 16]), ScopeSlot(1));
        let known = ScopeRef { id, slot, page_bytes: 4096, chained: true, codec: 0 };
        messages(&Scope::opaque("a", 4096, true), known)
    }

    #[test]
    fn every_request_and_response_variant_is_generated() {
        let made = |kind: u8| -> BTreeSet<u8> {
            all().iter().filter(|message| message[0] == kind).map(|message| message[1]).collect()
        };
        // `ReportQueues` and `RequestExplained` are the last variants. The encoding of a variant
        // begins with its number.
        let last_request = written(&Request::ReportQueues { lengths: [].as_slice().into() })[0];
        let last_response = written(&Response::RequestExplained(RequestExplanation::default()))[0];
        assert_eq!(made(REQUEST), (0..=last_request).collect());
        assert_eq!(made(RESPONSE), (0..=last_response).collect());
    }

    #[test]
    fn longer_lists_than_permitted_are_refused() {
        let is_decoded = |request: &Request<'_>| decode::<Request<'_>>(&written(request)).is_ok();
        let transfers =
            |counts| is_decoded(&Request::ReportTransfers { counts: vec![1; counts].into() });
        let queues =
            |lengths| is_decoded(&Request::ReportQueues { lengths: vec![1; lengths].into() });
        let speeds =
            |volumes| is_decoded(&Request::ReportSpeeds { speeds: vec![1; volumes].into() });
        let failed = |volumes| {
            is_decoded(&Request::ReportFailedWrites {
                reservation: 1,
                volumes: vec![1; volumes].into(),
            })
        };
        let commit = |runs| {
            is_decoded(&Request::Commit { reservation: 1, written: vec![None; runs].into() })
        };
        let report = |decisions| is_decoded(&Request::ReportDecisions { decisions, dropped: 0 });
        let decisions = |count| report(vec![Decision::default(); count].into());
        let decision = |made| report(vec![made].into());
        let id = |bytes| decision(Decision { request: "r".repeat(bytes), ..Decision::default() });
        let detail =
            |bytes| decision(Decision { detail: "d".repeat(bytes), ..Decision::default() });
        let keys = |count| {
            decision(Decision { keys: vec![[1; 8]; count].iter().collect(), ..Decision::default() })
        };
        let check = |what: &str, is_decoded: &dyn Fn(usize) -> bool, most: usize| {
            assert_eq!((is_decoded(most), is_decoded(most + 1)), (true, false), "{what}");
        };
        check("counts", &transfers, 256);
        check("queues", &queues, 64);
        check("speeds", &speeds, 256);
        check("volumes", &failed, 256);
        check("runs", &commit, 65_535);
        check("decisions", &decisions, 256);
        check("bytes of an id", &id, 128);
        check("bytes of a detail", &detail, 256);
        check("keys", &keys, DECISION_KEYS_MAX);
    }

    #[test]
    fn packed_keys_shorter_than_a_page_key_are_refused() {
        // `width` is the length of all keys, or zero if `lengths` holds the length of each key. The
        // first two messages have one byte per key, so their 100 keys are shorter than 8 bytes.
        let count = |width: u8, lengths: &[u8], bytes: &[u8]| {
            let message = written(&(width, lengths, bytes));
            decode::<Keys<'_>>(&message).unwrap().list().ok().map(|keys| keys.len())
        };
        assert_eq!((count(1, &[], &[7; 100]), count(0, &[0; 100], &[])), (None, None));
        assert_eq!((count(8, &[], &[7; 16]), count(0, &[8, 9], &[7; 17])), (Some(2), Some(2)));
    }

    #[test]
    fn core_grants_space_to_every_generated_reserve() {
        const MIB: u64 = 1 << 20;
        let options = Options {
            capacity: Some(8 * MIB),
            segment_bytes: Some(MIB),
            background_threads: false,
            ..Options::new(Path::new("/store"))
        };
        let core = StoreCore::open(Arc::new(SimDisk::new(64 * MIB)), &options, Arc::new(|_| true));
        let catalog = core.unwrap().catalog_for(ClientId(1), "0123456789abcdef");
        let scope = Scope::opaque("a", 70_000, true);
        let known = catalog.resolve(&scope, true).unwrap().unwrap();
        let messages = messages(&scope, known);
        let is_request = |message: &&[u8]| message[0] == REQUEST;
        let mut granted = 0;
        for bytes in messages.iter().map(Vec::as_slice).filter(is_request) {
            let request: Request<'_> = decode(&bytes[1..]).unwrap();
            let Request::Reserve { .. } = request else { continue };
            let asked = request.clone();
            match answer(&catalog, &ClientPermissions::default(), request) {
                Some(Response::Reserved(reserved)) if !reserved.runs.is_empty() => {
                    catalog.abort(reserved.id).unwrap();
                }
                refused => panic!("{asked:?}: {refused:?}"),
            }
            granted += 1;
        }
        assert_eq!(granted, EACH);
    }

    #[test]
    fn truncated_or_longer_messages_are_refused_and_damage_never_panics() {
        for message in all() {
            assert!(parse(&message));
            assert!(!parse(&[&message[..], &[0]].concat()), "trailing byte: {message:?}");
            for at in 0..message.len() {
                assert!(!parse(&message[..at]), "cut at {at}: {message:?}");
                for bit in 0..8 {
                    let mut bad = message.clone();
                    bad[at] ^= 1 << bit;
                    let _ = parse(&bad);
                }
            }
        }
    }
}
