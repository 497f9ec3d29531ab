//! Socket messages for a fuzzer, compiled only with the feature `fuzzing`.
//!
//! The first byte of an input selects which of the four kinds of message follows; on the socket the
//! sender's turn decides that.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a fuzzer fails by panicking")]

use crate::channel::decode;
use crate::greeting::{First, NEWEST, OLDEST};
use crate::owner_epoch::OwnerEpoch;
use crate::permissions::ClientPermissions;
use crate::protocol::{Hello, HelloReply};
use crate::server::answer;
use ritornello_format::{Error, Extent, Place, Scope, ScopeSettings, ScopeSlot, SegmentId};
use ritornello_store::{
    CapacityChange, Catalog, CatalogStats, Committed, IndexDecision, IndexTuning, KeyListing, Keys,
    LeaseNumber, Leased, Located, LocatedRun, Refusal, Request, ReserveRequest, Reserved,
    ReservedRun, Response, ScopeListing, ScopeRef, ScopeUsage, VolumeStats,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::borrow::Cow;
use std::fmt::Debug;
use std::time::Duration;

const HELLO: u8 = 0;
const WELCOME: u8 = 1;
const REQUEST: u8 = 2;
const RESPONSE: u8 = 3;

/// Returns whether `bytes` decode as this kind of message. If so, asserts that encoding and
/// decoding again gives the same bytes, no longer than the input. (Bytes are compared, because a
/// NaN differs from itself.)
macro_rules! is_message {
    ($kind:ty, $bytes:expr) => {
        decode::<$kind>($bytes).is_ok_and(|message| {
            let once = written(&message);
            let again = decode::<$kind>(&once).unwrap();
            assert!(written(&again) == once, "{message:?} is decoded again as {again:?}");
            assert!(once.len() <= $bytes.len(), "{message:?} holds more than came");
            true
        })
    };
}

/// Like `is_message`, for a first message.
fn is_first<T: Serialize + DeserializeOwned + Debug>(bytes: &[u8]) -> bool {
    let read = |bytes: &[u8]| First::<T>::read(bytes, OLDEST..=NEWEST, "a peer");
    read(bytes).is_ok_and(|message| {
        let once = written(&message);
        let again = read(&once).unwrap();
        assert!(written(&again) == once, "{message:?} is decoded again as {again:?}");
        assert!(once.len() <= bytes.len(), "{message:?} holds more than came");
        true
    })
}

/// Decodes `message` as a peer does. Returns whether it is valid.
///
/// # Panics
/// If a valid message changes when it is encoded and decoded again.
#[must_use]
pub fn parse(message: &[u8]) -> bool {
    let Some((kind, bytes)) = message.split_first() else { return false };
    match *kind {
        HELLO => is_first::<Hello>(bytes),
        WELCOME => is_first::<HelloReply>(bytes),
        REQUEST => is_message!(Request<'_>, bytes),
        RESPONSE => is_message!(Response, bytes),
        _ => false,
    }
}

/// Handles `message` as a server does. Returns whether it was a request. Skips capacity changes,
/// because they wait for threads.
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

/// Every kind of message; the requests are about `scope`, whose reference is `known`.
///
/// # Panics
/// Never: all of them can be encoded.
#[must_use]
pub fn messages(scope: &Scope, known: ScopeRef) -> Vec<Vec<u8>> {
    let kind = |kind: u8, message: Vec<u8>| [vec![kind], message].concat();
    let mut messages = Vec::new();
    for version in [OLDEST, NEWEST] {
        let hello = First { version, body: Hello::new("0123456789abcdef", true) };
        messages.push(kind(HELLO, written(&hello)));
        let replies = replies().into_iter().map(|body| First { version, body });
        messages.extend(replies.map(|first| kind(WELCOME, written(&first))));
    }
    let (short, long) = ([1u8; 8], [2u8; 64]);
    let (same, mixed) = ([&[1; 16][..], &[2; 16], &[3; 16]], [&short[..], &long]);
    let keys = [Keys::Listed(&same), Keys::Listed(&mixed)];
    let requests = questions(scope, known, keys, &long);
    messages.extend(requests.iter().map(|request| kind(REQUEST, written(request))));
    messages.extend(answers(known).iter().map(|response| kind(RESPONSE, written(response))));
    messages
}

fn written(message: &impl Serialize) -> Vec<u8> {
    postcard::to_stdvec(message).unwrap()
}

fn replies() -> [HelloReply; 3] {
    let epoch = OwnerEpoch { store: [7; 16], owner: 3, clean: true, durable: false };
    let error = Error::retry("the client's name is not locked").with("pid", 7);
    [HelloReply::Granted(epoch), HelloReply::Gone, HelloReply::Refused(error.into())]
}

fn questions<'a>(
    about: &'a Scope,
    scope: ScopeRef,
    [keys, mixed]: [Keys<'a>; 2],
    key: &'a [u8],
) -> Vec<Request<'a>> {
    let second = Duration::from_secs(1);
    let reserve_request =
        ReserveRequest { slices_per_page: 2, timeout: second, ..ReserveRequest::default() };
    // Values that a fuzzer does not reach by small mutations of small numbers.
    let greedy = ReserveRequest {
        flushed_later: true,
        page_units: vec![18; 3],
        retain_until: u64::MAX,
        timeout: Duration::MAX,
        ..reserve_request.clone()
    };
    let settings = ScopeSettings { quota_bytes: Some(1 << 20), ..ScopeSettings::default() };
    let most = ScopeSettings {
        codec: Some(u8::MAX),
        quota_bytes: Some(u64::MAX),
        retained_bytes: Some(u64::MAX),
    };
    vec![
        Request::Resolve { scope: Cow::Borrowed(about), create: true },
        Request::Probe { scope, keys },
        Request::Lease { scopes: Cow::Owned(vec![scope]), keys, ttl: second },
        Request::Release { lease: LeaseNumber(1) },
        Request::BeginRead { scope, keys },
        Request::Exists { scope, keys: mixed },
        Request::Lease { scopes: Cow::Owned(vec![scope; 3]), keys, ttl: Duration::MAX },
        Request::Reserve { scope, keys, parent: None, reserve_request: Cow::Owned(greedy) },
        Request::Reserve {
            scope,
            keys: mixed,
            parent: Some(key),
            reserve_request: Cow::Owned(reserve_request),
        },
        Request::Commit { reservation: 1, written: Cow::Owned(vec![Some(u64::MAX), None]) },
        Request::Abort { reservation: 1 },
        Request::ReportDamage { scope, key, generation: 1, reason: "checksum" },
        Request::Touch { scope, keys },
        Request::Delete { scope, keys },
        Request::DropScope { scope },
        Request::Configure { scope, settings },
        Request::Configure { scope, settings: most },
        Request::Scopes { from: ScopeSlot(0) },
        Request::Keys { scope, after: 0, limit: 2 },
        Request::ChangeCapacity {
            change: Cow::Owned(CapacityChange::AddVolume("/more".to_owned())),
        },
        Request::Clear,
        Request::Flush,
        Request::Stats,
    ]
}

fn answers(scope: ScopeRef) -> Vec<Response> {
    let place = Place {
        generation: 1 << 33,
        header_checksum: 77,
        header_units: 1,
        page_units: 4,
        extents: vec![Extent { segment: SegmentId::new(0, 1), start: 8, units: 13 }],
    };
    let located = LocatedRun { place: place.clone(), first: 0, pages: 3, at: 0 };
    let reserved = Reserved {
        id: 9,
        store: [7; 16],
        runs: vec![ReservedRun { place, at: 0, pages: 3 }],
        present: 0,
        refused: Some(Refusal::Quota),
        durable: true,
    };
    let described = Scope::opaque("a", scope.page_bytes, false);
    let held = ScopeListing { slot: scope.slot, scope: described, pages: 3, bytes: 1 << 20 };
    let mut stats = CatalogStats { open_ms: 0.5, ..CatalogStats::default() };
    stats.paths = vec![VolumeStats { dir: "/a".to_owned(), ..VolumeStats::default() }];
    stats.largest_scopes = vec![ScopeUsage::default()];
    let decisions = vec![IndexDecision { cost_ns: 1.5, ..IndexDecision::default() }];
    stats.index_tuning = Some(IndexTuning { decisions, ..IndexTuning::default() });
    stats.dropped_at_open.insert("scope".to_owned(), 3);
    vec![
        Response::Scope(Some(scope)),
        Response::Count(3),
        Response::Leased(Leased { pages: 3, lease: LeaseNumber(1) }),
        Response::Located(Located { lease: LeaseNumber(1), runs: vec![located] }),
        Response::Exists(vec![true, false]),
        Response::Reserved(reserved),
        Response::Committed(Committed { stored: 3, refused: Some(Refusal::Metadata) }),
        Response::Scopes(vec![held]),
        Response::Keys(KeyListing { keys: vec![vec![1; 8], vec![2; 64]], last: 1 << 33 }),
        Response::Done,
        Response::Stats(Box::new(stats)),
        Response::Failed(Error::miss("gone").into()),
    ]
}
