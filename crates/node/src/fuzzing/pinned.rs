//! The messages of a protocol version do not change. The encoding of one sample of each variant of
//! the messages, and of the enums within them, is recorded in
//! `crates/node/tests/recorded/messages-VERSION.txt`, for version 8 and later versions. The tests
//! compare the messages of version `greeting::NEWEST` with its file, and with the files of earlier
//! versions: the messages include every line of them, except the handshake, which has the version.
//!
//! postcard writes a variant as its position, and a struct as its fields without names. Inserting,
//! removing or reordering a variant or a field therefore changes the meaning of messages, silently.
//! To change a message: append the variant, or the field in a new variant; raise
//! `greeting::NEWEST`; and keep sending the old messages to processes of older versions
//! (`docs/sharing.md`, *Rolling upgrades*). Then record the messages of the new version:
//!
//! ```text
//! RITORNELLO_WRITE_GOLDEN=1 cargo test -p ritornello-node pinned
//! ```
//!
//! This command writes the file of version `greeting::NEWEST`, unless the file exists. A version
//! that was in no release may change: remove its file, and record it again.
//!
//! In version 8 an empty name in a hello denotes an observer. This new meaning of an old field is
//! safe: every release with version 8 has observers, and an owner refuses an empty name in version
//! 7.

use super::generator::Generator;
use super::written;
use crate::greeting::{First, NEWEST};
use crate::protocol::{Hello, HelloReply, OwnerEpoch};
use ritornello_format::{Error, ErrorKind, Scope, ScopeId, ScopeSettings, ScopeSlot};
use ritornello_store::{
    Answer, CapacityChange, Decision, DecisionEstimate, DecisionOutcome, Keys, Refusal, Request,
    ReserveRequest, Response, ScopeRef, WireError,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::path::PathBuf;

/// The first version with a recording of all messages.
const FIRST_RECORDED: u32 = 8;

/// Returns the name of the message's variant, with which its `Debug` text begins.
fn variant(message: &impl Debug) -> String {
    let text = format!("{message:?}");
    text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_owned()
}

/// Returns a line with `name` and the encoding of `message` in hexadecimal.
fn sample(name: &str, message: &(impl Serialize + Debug)) -> String {
    let hex: String = written(message).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{name} {hex}\n")
}

/// Appends one line for each variant of the enum `T` to `samples`.
fn each<'de, T: Deserialize<'de> + Serialize + Debug>(
    name: &str,
    known: super::generator::Known<'de>,
    samples: &mut String,
) {
    let (mut made, mut last) = (Vec::new(), None);
    Generator::with_first_nested(known).each_variant(
        1,
        |from| T::deserialize(from).ok(),
        |value| made.push(value),
    );
    for value in made {
        let line = sample(&format!("{name}::{}", variant(&value)), &value);
        assert_ne!(last.as_ref(), Some(&line));
        samples.push_str(&line);
        last = Some(line);
    }
}

fn samples() -> String {
    let (id, slot) = (ScopeId([3; 16]), ScopeSlot(7));
    let scope = Scope {
        page_tokens: 16,
        layers: (1, 2),
        kv_heads: (3, 4),
        head_dim: 64,
        extra: [("isa".to_owned(), "amx".to_owned())].into(),
        ..Scope::opaque("a", 4096, true)
    };
    let reference = ScopeRef { id, slot, page_bytes: 4096, chained: true, codec: 1 };
    let reserve = ReserveRequest {
        page_units: vec![1; 3],
        slices_per_page: 2,
        retain_until: 1 << 33,
        timeout: std::time::Duration::new(5, 6),
        flushed_later: true,
    };
    let keys: [&[u8]; 2] = [&[1; 8], &[2; 64]];
    let known = [
        ("Scope", vec![written(&scope)]),
        ("ScopeRef", vec![written(&reference)]),
        ("PackedKeys", vec![written(&Keys::Listed(&keys))]),
        ("ReserveRequest", vec![written(&reserve)]),
    ];
    let mut all = String::new();
    let hello = Hello { format: 1, name: "a".repeat(32), pid: 4, first: true };
    all += &sample("Hello", &First { version: NEWEST, body: hello });
    let observer = Hello { format: 1, name: String::new(), pid: 4, first: true };
    all += &sample("Hello::observer", &First { version: NEWEST, body: observer });
    let epoch = OwnerEpoch { store: [5; 16], owner: 300, clean: true, durable: false };
    let refusal = WireError::from(Error::retry("text"));
    for reply in [HelloReply::Granted(epoch), HelloReply::Gone, HelloReply::Refused(refusal)] {
        let name = format!("HelloReply::{}", variant(&reply));
        all += &sample(&name, &First { version: NEWEST, body: reply });
    }
    all += &sample("Scope", &scope);
    all += &sample("ScopeRef", &reference);
    all += &sample("ReserveRequest", &reserve);
    let settings = ScopeSettings { codec: Some(1), quota_bytes: Some(300), retained_bytes: None };
    all += &sample("ScopeSettings", &settings);
    let estimate = DecisionEstimate { with_load_micros: 300, without_load_micros: 7 };
    let decision = Decision {
        unix_millis: 1 << 40,
        pages: 2,
        found: 300,
        loaded: 1,
        detail: "text".to_owned(),
        estimate: Some(estimate),
        keys: keys.iter().collect(),
        ..Decision::now("a", id, DecisionOutcome::Declined)
    };
    all += &sample("Decision", &decision);
    for kind in
        [ErrorKind::Invalid, ErrorKind::Retry, ErrorKind::Miss, ErrorKind::Fatal, ErrorKind::Closed]
    {
        all += &sample(&format!("WireError::{kind:?}"), &WireError::from(Error::new(kind, "text")));
    }
    each::<Refusal>("Refusal", &known, &mut all);
    each::<CapacityChange>("CapacityChange", &known, &mut all);
    each::<Answer>("Answer", &known, &mut all);
    each::<DecisionOutcome>("DecisionOutcome", &known, &mut all);
    each::<Request<'_>>("Request", &known, &mut all);
    each::<Response>("Response", &known, &mut all);
    all
}

/// The recording of the messages of `version`.
fn recording(version: u32) -> PathBuf {
    let name = format!("tests/recorded/messages-{version}.txt");
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// Returns the lines of `older` that `newer` lacks, without the handshake.
fn lost<'a>(older: &'a str, newer: &str) -> Vec<&'a str> {
    let newer: BTreeSet<&str> = newer.lines().collect();
    let mut lines: Vec<&str> = older.lines().collect();
    lines.retain(|line| !line.starts_with("Hello") && !newer.contains(line));
    lines
}

#[test]
fn pinned_messages_match_recordings() {
    let path = recording(NEWEST);
    let made = samples();
    if !path.exists() && std::env::var_os("RITORNELLO_WRITE_GOLDEN").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let recorded = std::fs::read_to_string(&path).unwrap_or_else(|error| {
        panic!(
            "the messages of version {NEWEST} are not recorded ({error}): see the head of \
             crates/node/src/fuzzing/pinned.rs"
        )
    });
    for (made, recorded) in made.lines().zip(recorded.lines()) {
        assert_eq!(
            made, recorded,
            "a message of protocol version {NEWEST} changed: append instead, and raise NEWEST, as \
             the head of crates/node/src/fuzzing/pinned.rs says"
        );
    }
    assert_eq!(
        made.lines().count(),
        recorded.lines().count(),
        "variants were added or removed at the end: see the head of \
         crates/node/src/fuzzing/pinned.rs"
    );
}

/// A higher version does not permit to insert, remove or reorder: a process of the older version
/// is still sent the old messages.
#[test]
fn newest_messages_include_earlier_versions() {
    let newest = samples();
    for version in (FIRST_RECORDED..=NEWEST).filter(|version| *version < NEWEST) {
        let older = std::fs::read_to_string(recording(version)).unwrap();
        assert_eq!(lost(&older, &newest), [""; 0], "messages of version {version} changed");
    }
}

#[test]
fn lines_changed_by_an_inserted_variant_are_found() {
    let older = "Hello 08\nHelloReply::Gone 0801\nAnswer::Hit 00\nAnswer::Evicted 01\n";
    let inserted = "Hello 09\nAnswer::Hit 00\nAnswer::Pinned 01\nAnswer::Evicted 02\n";
    assert_eq!(lost(older, inserted), ["Answer::Evicted 01"]);
    let appended = "Hello 09\nAnswer::Hit 00\nAnswer::Evicted 01\nAnswer::Pinned 02\n";
    assert_eq!(lost(older, appended), [""; 0]);
}

#[test]
fn every_variant_of_every_enum_has_a_line() {
    let mut enums = Generator::enums(|from| drop(HelloReply::deserialize(from)));
    enums.extend(Generator::enums(|from| drop(Request::deserialize(from))));
    enums.extend(Generator::enums(|from| drop(Response::deserialize(from))));
    for name in ["Answer", "CapacityChange", "DecisionOutcome", "Kind", "Refusal"] {
        assert!(enums.contains_key(name), "{name}: {enums:?}");
    }
    let samples = samples();
    for (name, variants) in enums {
        // `Kind` is the first field of a `WireError`, and private to the store.
        let pinned = if name == "Kind" { "WireError::" } else { &format!("{name}::") };
        let lines = samples.lines().filter(|line| line.starts_with(pinned)).count();
        assert_eq!(lines, variants.len(), "add lines for the variants of {name} to `samples`");
    }
}
