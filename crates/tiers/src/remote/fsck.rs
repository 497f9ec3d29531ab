//! Reads every object of a remote, and says which ones no reader would take.

use super::backend::Backend;
use super::inventory::{Inventory, Object};
use super::keyring::KeyRing;
use super::object::{self, Contents, Part};
use super::read_failures::ReadFailures;
use super::refused::{Refused, Verified};
use super::spans::{self, Form};
use ritornello_format::Result;

/// Objects that are read at once.
const AT_ONCE: usize = 4;

/// What was found.
#[derive(Clone, Debug, Default)]
pub struct RemoteCheck {
    /// Objects, pages and bytes that were read.
    pub objects: u64,
    /// See `objects`.
    pub pages: u64,
    /// See `objects`.
    pub bytes: u64,
    /// Names of objects that no reader takes, and why.
    pub damaged: Vec<(String, String)>,
    /// Those of them that were removed.
    pub removed: u64,
    /// Sealed objects whose key is not at hand, and why: they are neither damaged nor removed.
    pub unknown_key: Vec<(String, String)>,
    /// Objects of which only checksums were verified: they have no seal, or no key was given.
    pub unauthenticated: u64,
    /// Names of objects that could not be read, and why: they may be damaged or not.
    pub unreadable: Vec<(String, String)>,
    /// Objects that went while they were read: somebody collects.
    pub gone: u64,
}

/// Reads the objects of `inventory`, and removes those that are damaged if `repair`: whoever has the
/// pages writes them again when it puts their prompt. With `keys` the seals of sealed objects are
/// verified. `each` hears of every object that is done.
///
/// # Errors
/// If the remote cannot be read: eight objects in a row fail.
pub fn fsck(
    backend: &dyn Backend,
    inventory: &Inventory,
    keys: Option<&KeyRing>,
    repair: bool,
    each: &mut dyn FnMut(&Object),
) -> Result<RemoteCheck> {
    let (mut check, mut failures) = (RemoteCheck::default(), ReadFailures::default());
    for objects in inventory.objects.chunks(AT_ONCE) {
        // A listing may say any length: no more is read than an object can have, and one byte to tell.
        let most = Some(0..object::BYTES_MAX + 1);
        let asked: Vec<_> =
            objects.iter().map(|object| (object.name.as_str(), most.clone())).collect();
        for (object, read) in objects.iter().zip(backend.get_batch(&asked)) {
            each(object);
            let read = match failures.tolerate(read)? {
                Ok(read) => read,
                Err(error) => {
                    check.unreadable.push((object.name.clone(), error.to_string()));
                    continue;
                }
            };
            let Some(value) = read else {
                check.gone += 1;
                continue;
            };
            check.objects += 1;
            check.pages += u64::from(object.pages);
            check.bytes += value.len() as u64;
            check.unauthenticated += u64::from(object.form == Form::Plain || keys.is_none());
            let wrong = match check_object(object, &value, keys) {
                Ok(()) => continue,
                Err(wrong) => (object.name.clone(), wrong.to_string(), wrong),
            };
            let (name, why, wrong) = wrong;
            if matches!(wrong, Refused::UnknownKey(_)) {
                check.unknown_key.push((name, why));
                continue;
            }
            // One that cannot be removed stays among the damaged.
            if repair && failures.tolerate(backend.delete(&name))?.is_ok() {
                check.removed += 1;
            }
            check.damaged.push((name, why));
        }
    }
    Ok(check)
}

fn check_object(object: &Object, value: &[u8], keys: Option<&KeyRing>) -> Verified<()> {
    if value.len() as u64 > object::BYTES_MAX || object.bytes > object::BYTES_MAX {
        return Err(Refused::damaged("it is longer than any object"));
    }
    let scope = object.scope_id().unwrap_or_default();
    let contents = Contents::read(value, object.form, keys.map(|keys| (keys, &scope)))?;
    let header = &contents.header;
    let named = header
        .keys
        .last()
        .map(|last| spans::name(object.form, &header.scope, last, header.keys.len()));
    if named.as_deref() != Some(&object.name) {
        return Err(Refused::damaged("it holds other pages than its name says"));
    }
    // No header says more than PAGE_BYTES_MAX.
    let mut page = vec![0; header.page_bytes as usize];
    let part = Part { at: 0, bytes: value };
    for at in 0..header.keys.len() {
        if let (_, Some(why)) = contents.unpack(&part, at..at + 1, &mut page) {
            return Err(why);
        }
    }
    Ok(())
}
