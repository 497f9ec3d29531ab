//! Reads every object of a remote and reports the objects that readers would reject.

use super::backend::Backend;
use super::inventory::{Inventory, Object};
use super::keyring::KeyRing;
use super::object::{self, Contents, ObjectBytes};
use super::packing::{self, Form};
use super::read_failures::ReadFailures;
use super::rejected::{RejectReason, Verified};
use ritornello_format::Result;

/// Objects per batch of reads.
const AT_ONCE: usize = 4;

/// Result of a check.
#[derive(Clone, Debug, Default)]
pub struct RemoteCheck {
    /// Objects read.
    pub objects: u64,
    /// Pages of the objects read.
    pub pages: u64,
    /// Bytes of the objects read.
    pub bytes: u64,
    /// Names of objects that readers reject, and the reason.
    pub damaged: Vec<(String, String)>,
    /// Damaged objects that were removed.
    pub removed: u64,
    /// Sealed objects whose key is not available, and the reason: neither counted as damaged nor
    /// removed.
    pub unknown_key: Vec<(String, String)>,
    /// Objects read of which only the checksums were verified, because they have no seal, or
    /// because no key was given.
    pub unauthenticated: u64,
    /// Names of objects that could not be read, and the error: whether these objects are damaged is
    /// unknown.
    pub unreadable: Vec<(String, String)>,
    /// Objects that were listed and no longer existed when they were read, usually because a
    /// collector removed them.
    pub gone: u64,
}

/// Reads the objects of `inventory`, and with `repair` removes damaged objects: a later put of the
/// prompt writes the object again. With `keys` the seals of sealed objects are verified. `each` is
/// called for every object.
///
/// # Errors
/// The last error of the remote after eight consecutive failures to read an object; the first
/// `Invalid` error, because it means that the backend lacks the operation.
pub fn fsck(
    backend: &dyn Backend,
    inventory: &Inventory,
    keys: Option<&KeyRing>,
    repair: bool,
    each: &mut dyn FnMut(&Object),
) -> Result<RemoteCheck> {
    let (mut check, mut failures) = (RemoteCheck::default(), ReadFailures::default());
    for objects in inventory.objects.chunks(AT_ONCE) {
        // The length in a listing cannot be trusted, so at most one byte more than the longest
        // object is read.
        let most = Some(0..object::BYTES_MAX + 1);
        let requests: Vec<_> =
            objects.iter().map(|object| (object.name.as_str(), most.clone())).collect();
        for (object, read) in objects.iter().zip(backend.get_batch(&requests)) {
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
            let rejected = match check_object(object, &value, keys) {
                Ok(()) => continue,
                Err(reason) => (object.name.clone(), reason.to_string(), reason),
            };
            let (name, why, reason) = rejected;
            if matches!(reason, RejectReason::UnknownKey(_)) {
                check.unknown_key.push((name, why));
                continue;
            }
            // A failed removal ends the check only if the backend does not support deletion: the
            // read of the object has succeeded just before, so the removal is not the eighth
            // consecutive failure.
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
        return Err(RejectReason::damaged("longer than the maximum of an object"));
    }
    let scope = object.scope_id().unwrap_or_default();
    let contents = Contents::read(value, object.form, keys.map(|keys| (keys, &scope)))?;
    let header = &contents.header;
    let named = header
        .keys
        .last()
        .map(|last| packing::name(object.form, &header.scope, last, header.keys.len()));
    if named.as_deref() != Some(&object.name) {
        return Err(RejectReason::damaged("the object's pages do not match its name"));
    }
    // The length is at most PAGE_BYTES_MAX, because decoding rejects longer pages.
    let mut page = vec![0; header.page_bytes as usize];
    let part = ObjectBytes { at: 0, bytes: value };
    for at in 0..header.keys.len() {
        if let (_, Some(why)) = contents.unpack(&part, at..at + 1, &mut page) {
            return Err(why);
        }
    }
    Ok(())
}
