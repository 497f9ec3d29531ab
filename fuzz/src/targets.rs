//! The parsers, valid inputs for each parser, and the recomputation of checksums in changed inputs.

use crate::{indexes, socket};
use ritornello_codec::{Codec, Dtype, SliceKind, SliceShape, decode};
use ritornello_format::checkpoint::{CheckpointFrame, CheckpointHeader};
use ritornello_format::journal::{
    JournalHeader, JournalRecord, Parsed, Retentions, RunImage, read_frame,
};
use ritornello_format::residency::{Holder, ResidencyHeader, ResidencyRecord, Tier, Worker};
use ritornello_format::wire::Writer;
use ritornello_format::{
    Extent, Manifest, PageHash, Place, ReservationRecord, RunHeader, Scope, ScopeId, ScopeRegistry,
    ScopeSettings, ScopeSlot, SegmentId, Slice, VolumeMarker, VolumeRecord, checksum,
};
use ritornello_node::fuzzing;
use ritornello_sim::{BadLines, read};
use ritornello_tiers::remote::{KeyRing, fuzzing as fuzzing_remote};
use std::borrow::Cow;
use std::io::Write;

pub struct Target {
    pub name: &'static str,
    /// Valid inputs. The fuzzer changes copies of them.
    pub seeds: Vec<Vec<u8>>,
    /// Recomputes lengths and checksums of a changed input. [`keep`] recomputes none.
    pub seal: fn(&mut Vec<u8>),
    /// Parses an input. Returns whether the parser accepted the input.
    pub parse: fn(&[u8]) -> bool,
}

/// Seals an input that ends with a checksum over all bytes before the checksum.
fn seal_end(input: &mut Vec<u8>) {
    let body = input.len().saturating_sub(8);
    let sum = checksum(&input[..body]).to_le_bytes();
    input.truncate(body);
    input.extend(sum);
}

/// Seals a file: magic (8), version, features, length of the body, body, checksum.
fn seal_file(input: &mut Vec<u8>) {
    if let Some(body) = input.len().checked_sub(28) {
        input[16..20].copy_from_slice(&(body as u32).to_le_bytes());
    }
    seal_end(input);
}

/// Seals a file: magic, version and features (16 bytes), then records: length of the body, body,
/// checksum. The checksum of the first record covers the first 16 bytes too. If a record claims
/// more bytes than the input has, its body is made to end before the last 8 bytes of the input.
fn seal_log(input: &mut [u8]) {
    let (mut start, mut fixed) = (0, 20);
    while let Some(rest) = input.len().checked_sub(start + fixed + 8) {
        let length = start + fixed - 4..start + fixed;
        let claimed: [u8; 4] = input[length.clone()].try_into().unwrap_or_default();
        let body =
            usize::try_from(u32::from_le_bytes(claimed)).map_or(rest, |claimed| claimed.min(rest));
        input[length].copy_from_slice(&(body as u32).to_le_bytes());
        let end = start + fixed + body;
        let sum = checksum(&input[start..end]).to_le_bytes();
        input[end..end + 8].copy_from_slice(&sum);
        (start, fixed) = (end + 8, 4);
    }
}

/// Seals the header of a run: magic (8), version, total length, other fields, checksum.
fn seal_header(input: &mut Vec<u8>) {
    if input.len() >= 24 {
        let length = input.len() as u32;
        input[12..16].copy_from_slice(&length.to_le_bytes());
    }
    seal_end(input);
}

/// Seals a frame: length, sequence and kind, body, checksum.
fn seal_frame(input: &mut Vec<u8>) {
    if let Some(length) = input.len().checked_sub(12) {
        input[..4].copy_from_slice(&(length as u32).to_le_bytes());
    }
    seal_end(input);
}

fn keep(_: &mut Vec<u8>) {}

fn frame(write: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let mut writer = Writer::new();
    write(&mut writer);
    writer.into_vec()
}

pub fn targets() -> Vec<Target> {
    vec![
        Target {
            name: "manifest",
            seeds: vec![manifest().encode()],
            seal: seal_file,
            parse: |bytes| Manifest::decode(bytes).is_ok(),
        },
        Target {
            name: "volume",
            seeds: vec![VolumeMarker { store: [9; 16], volume: 3 }.encode()],
            seal: seal_file,
            parse: |bytes| VolumeMarker::decode(bytes).is_ok(),
        },
        Target {
            name: "registry",
            seeds: registries(),
            seal: |input| seal_log(input),
            parse: |bytes| ScopeRegistry::decode(bytes).is_ok(),
        },
        Target {
            name: "reservations",
            seeds: reservations(),
            seal: |input| seal_log(input),
            parse: |bytes| ReservationRecord::decode_log(bytes).is_ok_and(|log| !log.is_empty()),
        },
        Target { name: "journal", seeds: records(), seal: seal_frame, parse: journal },
        Target {
            name: "checkpoint",
            seeds: checkpoint_frames(),
            seal: seal_frame,
            parse: checkpoint,
        },
        Target { name: "residency", seeds: residency(), seal: seal_frame, parse: holders },
        Target {
            name: "file_header",
            seeds: vec![
                JournalHeader { number: 3, first: 9 }.encode(),
                CheckpointHeader { id: 1, journal: 2, first: 3 }.encode(),
                ResidencyHeader { number: 3, first: 9 }.encode(),
            ],
            seal: seal_end,
            parse: |bytes| {
                JournalHeader::decode(bytes).is_ok()
                    || CheckpointHeader::decode(bytes).is_ok()
                    || ResidencyHeader::decode(bytes).is_ok()
            },
        },
        Target {
            name: "run_header",
            seeds: vec![run_header().encode().unwrap().0],
            seal: seal_header,
            parse: |bytes| RunHeader::decode(bytes).is_ok(),
        },
        Target {
            name: "object",
            seeds: fuzzing_remote::objects(),
            seal: |input| fuzzing_remote::seal(input),
            parse: fuzzing_remote::object,
        },
        Target {
            name: "name",
            seeds: fuzzing_remote::names(),
            seal: keep,
            parse: fuzzing_remote::name,
        },
        Target { name: "key_file", seeds: key_files(), seal: keep, parse: key_file },
        Target { name: "codec", seeds: codec_frames(), seal: keep, parse: codec },
        Target { name: "message", seeds: socket::messages(), seal: keep, parse: fuzzing::parse },
        Target { name: "request", seeds: socket::requests(), seal: keep, parse: socket::send },
        Target { name: "indexes", seeds: indexes::operations(), seal: keep, parse: indexes::run },
        Target { name: "trace", seeds: traces(), seal: keep, parse: trace },
    ]
}

fn manifest() -> Manifest {
    Manifest {
        uuid: [7; 16],
        owner_epoch: 3,
        generations: 3,
        clean: true,
        segment_bytes: 1 << 20,
        capacity: 1 << 30,
        index: "run".to_owned(),
        volumes: vec![VolumeRecord::new("a".to_owned()), VolumeRecord::new("/b".to_owned())],
        owner: "host 1 pid 2".to_owned(),
    }
}

fn registry() -> ScopeRegistry {
    let scopes = [
        (ScopeSlot(1), Scope::opaque("one", 4096, true).into()),
        (ScopeSlot(4), Scope::opaque("two", 70_000, false).into()),
    ];
    let settings =
        ScopeSettings { codec: Some(1), quota_bytes: Some(1 << 20), retained_bytes: None };
    ScopeRegistry { next: 9, scopes: scopes.into(), settings: [(ScopeSlot(4), settings)].into() }
}

fn registries() -> Vec<Vec<u8>> {
    let mut appended = registry().encode();
    appended.extend(ScopeRegistry::registration(ScopeSlot(9), &Scope::opaque("three", 1, true)));
    appended.extend(ScopeRegistry::removal(&[ScopeSlot(1), ScopeSlot(9)]));
    let torn = appended[..appended.len() - 7].to_vec();
    vec![ScopeRegistry::default().encode(), registry().encode(), appended, torn]
}

fn extents() -> Vec<Extent> {
    let extent = |number, start, units| Extent { segment: SegmentId::new(0, number), start, units };
    vec![extent(0, 0, 9), extent(1, 64, 64)]
}

fn reservations() -> Vec<Vec<u8>> {
    let reserved =
        ReservationRecord::Reserved { id: 5, client: "abc".to_owned(), extents: extents() };
    let ended = ReservationRecord::Ended { id: 5 };
    let one = ReservationRecord::encode_log(std::slice::from_ref(&reserved));
    vec![one, ReservationRecord::encode_log(&[reserved, ended])]
}

fn place() -> Place {
    Place {
        extents: extents(),
        generation: 1 << 33,
        header_checksum: 77,
        header_units: 1,
        page_units: 24,
    }
}

fn image(place: &Place) -> RunImage<'_> {
    let pages: Vec<PageHash> =
        (0..3u8).map(|n| PageHash::of(&ScopeId([1; 16]), &[n; 16])).collect();
    RunImage {
        run: 1 << 32 | 5,
        scope: ScopeSlot(2),
        chained: true,
        parent: Some((1 << 32 | 4, 3)),
        recency: 99,
        place: Cow::Borrowed(place),
        pages: Cow::Owned(pages),
    }
}

fn records() -> Vec<Vec<u8>> {
    let place = place();
    let records = [
        JournalRecord::Insert(image(&place)),
        JournalRecord::Cut(vec![(5, 1), (6, 0)]),
        JournalRecord::Touch(vec![(5, 100), (6, 101)]),
        JournalRecord::Link { child: 5, parent: 4, page: 2 },
    ];
    records.iter().map(|record| frame(|writer| record.encode(7, writer))).collect()
}

fn checkpoint_frames() -> Vec<Vec<u8>> {
    let place = place();
    let images = frame(|writer| {
        image(&place).encode(writer);
        image(&place).encode(writer);
    });
    let retained = Retentions { clock: 9, runs: vec![(5, 1000)] };
    vec![
        frame(|writer| CheckpointFrame::encode_runs(1, &images, writer)),
        frame(|writer| CheckpointFrame::encode_retained(2, &retained, writer)),
        frame(|writer| CheckpointFrame::encode_end(3, &Default::default(), writer)),
    ]
}

fn residency() -> Vec<Vec<u8>> {
    let (scope, pages) =
        (ScopeSlot(1), Cow::<[_]>::Owned(vec![PageHash([1; 16]), PageHash([2; 16])]));
    let holder = |worker| Holder { worker: Worker(worker), tiers: Tier::Host.into() };
    let holders = Cow::Owned(vec![holder(1), holder(2)]);
    let parent = Some(PageHash([3; 16]));
    let records = [
        ResidencyRecord::Stored { scope, parent, holders, pages: pages.clone() },
        ResidencyRecord::Removed { scope, holder: holder(1), pages },
        ResidencyRecord::ClearedWorker(Worker(1)),
        ResidencyRecord::ClearedScope(scope),
        ResidencyRecord::Complete,
    ];
    records.iter().map(|record| frame(|writer| record.encode(1, writer))).collect()
}

fn holders(bytes: &[u8]) -> bool {
    match read_frame(bytes) {
        Parsed::Frame(frame) => ResidencyRecord::decode(frame.kind, frame.body).is_ok(),
        _ => false,
    }
}

fn journal(bytes: &[u8]) -> bool {
    match read_frame(bytes) {
        Parsed::Frame(frame) => JournalRecord::decode(frame.kind, frame.body).is_ok(),
        _ => false,
    }
}

fn checkpoint(bytes: &[u8]) -> bool {
    let Parsed::Frame(frame) = read_frame(bytes) else { return false };
    match CheckpointFrame::decode(frame.kind, frame.body) {
        Ok(CheckpointFrame::Runs(runs)) => runs.into_iter().all(|image| image.is_ok()),
        decoded => decoded.is_ok(),
    }
}

fn run_header() -> RunHeader {
    RunHeader {
        store: [7; 16],
        scope: ScopeId([1; 16]),
        slot: ScopeSlot(2),
        generation: 1 << 33,
        page_bytes: 4096,
        header_units: 1,
        page_units: 1,
        parent: Some(vec![3; 16]),
        extents: extents(),
        extents_total: 2,
        keys: (0..4u8).map(|n| vec![n; 16]).collect(),
        slices_per_page: 1,
        slices: (0..4).map(|n| Slice { bytes: 4096, codec: 0, checksum: n }).collect(),
    }
}

/// Count of numbers in the slice that each input of [`codec_frames`] encodes.
const NUMBERS: usize = 64 * 32;

/// Returns an input for each codec: the codec's number, then a frame.
fn codec_frames() -> Vec<Vec<u8>> {
    let value = |at: usize| {
        let x = ((at * 37 % 101) as f32 - 50.0) * (1.0 + (at % 32) as f32) / 99.0;
        ((x.to_bits() >> 16) as u16).to_le_bytes()
    };
    let input: Vec<u8> = (0..NUMBERS).flat_map(value).collect();
    let shape =
        SliceShape { dtype: Dtype::Bf16, kind: SliceKind::Keys { tokens: 64, channels: 32 } };
    let frame = |codec: Codec| {
        let mut out = vec![0; codec.bound(&shape, input.len())];
        let (codec, bytes) = codec.encode(&shape, &input, &mut out).unwrap();
        [&[codec as u8], &out[..bytes]].concat()
    };
    Codec::ALL.into_iter().map(frame).collect()
}

fn codec(bytes: &[u8]) -> bool {
    let Some((number, frame)) = bytes.split_first() else { return false };
    let mut out = vec![0; 2 * NUMBERS];
    decode(*number, frame, &mut out).is_ok()
}

fn key_files() -> Vec<Vec<u8>> {
    let key = |id: &str| format!("{id} {}\n", "0123456789abcdef".repeat(4));
    vec![key("2026a").into_bytes(), format!("# keys\n{}\n{}", key("b"), key("a")).into_bytes()]
}

/// Parses the text of a remote's key file. Panics if an error quotes 32 consecutive characters of a
/// key of [`key_files`].
fn key_file(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    match KeyRing::parse(text) {
        Ok(keys) => !keys.ids().is_empty(),
        Err(error) => {
            assert!(!error.to_string().contains("0123456789abcdef0"), "{error}");
            false
        }
    }
}

fn traces() -> Vec<Vec<u8>> {
    let line = r#"{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}"#;
    vec![format!("{line}\n\n{line}\n").into_bytes()]
}

fn trace(bytes: &[u8]) -> bool {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    read(file.path(), BadLines::Skip, &mut |_| {}).is_ok()
}
