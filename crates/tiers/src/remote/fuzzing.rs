//! Entry points for fuzzing objects, seals and names of a remote, compiled with the Cargo feature
//! `fuzzing`.
//!
//! The first byte of an input of [`object`] selects the form of the object; the bytes of the object
//! follow. [`seal`] makes the checksum of the input's run header valid, and for about half of the
//! inputs the seal too.

#![allow(clippy::unwrap_used, reason = "a fuzzer fails by panicking")]

use super::backend::Listed;
use super::inventory;
use super::keyring::KeyRing;
use super::object::{self, Contents, ObjectBytes};
use super::options::RemoteOptions;
use super::packing::Form;
use super::seal::Sealer;
use ritornello_format::{RUN_MAGIC, ScopeId, checksum};
use std::sync::Arc;

const SCOPE: ScopeId = ScopeId([5; 16]);
const PAGE: usize = 700;
const PAGES: usize = 4;
/// Bytes of the seal before the run header of a sealed object (`seal::FRONT_BYTES`).
const FRONT: usize = 68;
/// Maximum length of a page that the fuzzer unpacks. Allocating longer pages, up to 512 MiB, for
/// each input would take most of the time.
const PAGE_MAX: u64 = 1 << 20;

fn options(zstd: Option<i32>, form: Form) -> RemoteOptions {
    let ring = || Arc::new(KeyRing::parse(&format!("a {}", "0a".repeat(32))).unwrap());
    RemoteOptions { zstd, keys: (form == Form::Sealed).then(ring) }
}

fn form(byte: u8) -> Form {
    if byte.is_multiple_of(2) { Form::Plain } else { Form::Sealed }
}

/// Valid objects of both forms, compressed and not.
#[must_use]
pub fn objects() -> Vec<Vec<u8>> {
    let keys: Vec<Vec<u8>> = (0..PAGES as u8).map(|n| vec![n; 32]).collect();
    let pages: Vec<Vec<u8>> = (0..PAGES as u8).map(|n| vec![n ^ 0x55; PAGE]).collect();
    let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    let pages: Vec<&[u8]> = pages.iter().map(Vec::as_slice).collect();
    let mut all = Vec::new();
    for what in 0..4 {
        for zstd in [None, Some(1)] {
            let options = options(zstd, form(what));
            let object = object::pack(&SCOPE, Some(&[9; 64]), &keys, &pages, &options).unwrap();
            all.push([&[what][..], &object].concat());
        }
    }
    all
}

/// Corrects the checksum of the header, and for about half of the inputs the seal.
pub fn seal(input: &mut [u8]) {
    let Some((&mut what, object)) = input.split_first_mut() else { return };
    let Some(at) = object.windows(8).position(|eight| eight == RUN_MAGIC) else { return };
    let length = |at: usize| -> Option<usize> {
        Some(u32::from_le_bytes(object.get(at..at + 4)?.try_into().ok()?) as usize)
    };
    let Some(bytes) = length(at + 12).filter(|bytes| *bytes >= 24 && at + bytes <= object.len())
    else {
        return;
    };
    let pages = length(16).filter(|pages| *pages <= 128);
    let end = at + bytes;
    let sum = checksum(&object[at..end - 8]).to_le_bytes();
    object[end - 8..end].copy_from_slice(&sum);
    let (Form::Sealed, 2.., FRONT, Some(pages)) = (form(what), what, at, pages) else { return };
    if end + pages * 32 > object.len() {
        return;
    }
    let keys = options(None, Form::Sealed).keys.unwrap();
    let sealer = Sealer::new(keys.newest().unwrap(), &SCOPE);
    let tags: Vec<blake3::Hash> = object[end..end + pages * 32]
        .chunks(32)
        .map(|tag| blake3::Hash::from_slice(tag).unwrap())
        .collect();
    let sealed = sealer.seal(&object[at..end], &tags);
    object[..sealed.len()].copy_from_slice(&sealed);
}

/// Reads an object without the key, as `fsck` and `gc` do if they are given none, and then with the
/// key, as a reader does. Returns whether the second read accepts all pages of the object.
#[must_use]
pub fn object(input: &[u8]) -> bool {
    let Some((&what, object)) = input.split_first() else { return false };
    let options = options(None, form(what));
    let verify = options.keys.as_deref().map(|keys| (keys, &SCOPE));
    let mut whole = false;
    for verify in [None, verify] {
        let Ok(contents) = Contents::read(object, options.form(), verify) else {
            whole = false;
            continue;
        };
        let pages = contents.header.keys.len();
        let end = contents.stored_range(0..pages).end;
        assert!(end <= object::BYTES_MAX, "an object of {end} bytes");
        if contents.header.page_bytes > PAGE_MAX {
            continue;
        }
        let mut out = vec![0; contents.header.page_bytes as usize];
        let part = ObjectBytes { at: 0, bytes: object };
        let accepted =
            (0..pages).filter(|&page| contents.unpack(&part, page..page + 1, &mut out).0 == 1);
        whole = accepted.count() == pages;
    }
    whole
}

/// One valid name of each form of object.
#[must_use]
pub fn names() -> Vec<Vec<u8>> {
    let hex = "0123456789abcdef0123456789abcdef";
    ["3", "4"].map(|root| format!("ritornello/{root}/{hex}/{hex}.32").into_bytes()).to_vec()
}

/// Whether `name` is the name of an object.
#[must_use]
pub fn name(name: &[u8]) -> bool {
    let Ok(name) = std::str::from_utf8(name) else { return false };
    let listed = Listed { name: name.to_owned(), bytes: u64::MAX, written: u64::MAX };
    let inventory = inventory::Inventory::of([listed.clone(), listed]);
    let Some(object) = inventory.objects.first() else { return false };
    assert!(object.header_bytes() < 1 << 15 && object.scope_id().is_some(), "{object:?}");
    true
}
