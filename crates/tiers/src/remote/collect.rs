//! Garbage collection of a remote: removes objects that were not written or continued within an age
//! limit, and then the oldest objects until all fit a byte budget.
//!
//! A lookup starts at the beginning of a prompt, so an object is removed after the objects that
//! continue it: for its age, the last write of the object or of any object that continues it
//! counts. Exception: orphans, objects whose preceding object was removed or never written, are
//! removed first, even before the objects that continue them. The header of an object names the
//! page before the object; headers are read only if an object exceeds the age limit, or all objects
//! together exceed the budget.
//!
//! **Concurrent readers and writers.** Objects are removed whole. If a reader found an object that
//! is then removed, the read is a miss, and the request is computed. A writer that found the object
//! before its removal counts it as existing until ten minutes after it was found. Until then the
//! writer does not write the object again, and the later objects that it writes are orphans. Both
//! cases cost hits but deliver no wrong byte: names are derived from the keys of the pages, so an
//! object that is written again has the same pages (possibly with other compression or another
//! seal). Objects younger than the grace period stay. Concurrent collectors with the same options
//! choose the same objects; deleting an object twice is harmless. Ages are measured by the remote's
//! clock, which is read by writing an object. Unfinished files of killed writers are removed after
//! a day.

use super::backend::Backend;
use super::inventory::{CLOCK, Inventory, Object};
use super::keyring::KeyRing;
use super::object::Contents;
use super::packing::{self, Form};
use super::read_failures::ReadFailures;
use ritornello_format::{Error, PageHash, Result};
use std::collections::HashMap;
use std::fmt::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Number of object headers that one batch of requests reads.
const HEADERS_AT_ONCE: usize = 64;

/// Age at which a temporary value counts as abandoned. Its writer needs far less time to write an
/// object or to read the clock.
const UNFINISHED_FOR: Duration = Duration::from_secs(24 * 3600);

/// Limits of a collection.
#[derive(Clone, Copy, Debug)]
pub struct CollectOptions {
    /// Maximum time since the last write of an object, or of an object that continues it; `None`
    /// for no limit.
    pub max_age: Option<Duration>,
    /// Maximum bytes of all objects together; `None` for no limit.
    pub budget: Option<u64>,
    /// An object is not removed while it, or an object that continues it, is younger than `grace`.
    pub grace: Duration,
    /// Reports the objects to remove, without removing them.
    pub dry_run: bool,
}

/// Result of a collection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Objects found.
    pub objects: u64,
    /// Bytes of the objects found.
    pub bytes: u64,
    /// Objects removed, or to be removed in a dry run.
    pub removed_objects: u64,
    /// Bytes of the removed objects.
    pub removed_bytes: u64,
    /// Removed orphans: objects whose preceding object was missing.
    pub orphans: u64,
    /// Objects and unfinished files that could not be removed.
    pub failed: u64,
    /// Objects whose header could not be read; an unreadable object counts as the beginning of a
    /// prompt.
    pub unreadable: u64,
}

/// Removes objects beyond the limits. With `keys` the headers of sealed objects are verified; a
/// sealed object without a valid seal counts as the beginning of a prompt. `each` is called for
/// every object before its removal, in a dry run too.
///
/// # Errors
/// The remote's error if the listing or reading the remote's clock fails, or if eight consecutive
/// headers cannot be read; `Invalid` if the backend does not support listing or deletion.
pub fn collect(
    backend: &dyn Backend,
    options: &CollectOptions,
    keys: Option<&KeyRing>,
    each: &mut dyn FnMut(&Object),
) -> Result<Collected> {
    let (inventory, now) = take_inventory(backend)?;
    let mut done = Collected {
        objects: inventory.objects.len() as u64,
        bytes: inventory.bytes(),
        ..Collected::default()
    };
    let age = |then: u64| Duration::from_secs(now.saturating_sub(then));
    for left in inventory.unfinished.iter().filter(|left| age(left.written) > UNFINISHED_FOR) {
        if !options.dry_run && backend.delete(&left.name).is_err() {
            done.failed += 1;
        }
    }
    let too_old = |then: u64| options.max_age.is_some_and(|most| age(then) > most);
    let over = options.budget.map_or(0, |budget| done.bytes.saturating_sub(budget));
    if over == 0 && !inventory.objects.iter().any(|object| too_old(object.written)) {
        return Ok(done);
    }
    let (mut states, unreadable) = object_states(backend, &inventory, keys)?;
    done.unreadable = unreadable;
    // Remove orphans first, then the oldest objects. If objects are equally old, remove the object
    // that is deepest in its prompt first.
    states.sort_by_key(|at| (!at.orphan, at.last_needed, std::cmp::Reverse(at.depth)));
    for ObjectState { object, last_needed, orphan, .. } in states {
        let removable = too_old(last_needed) || done.removed_bytes < over;
        if !removable || age(last_needed) < options.grace {
            continue;
        }
        each(object);
        if !options.dry_run && backend.delete(&object.name).is_err() {
            done.failed += 1;
            continue;
        }
        done.removed_objects += 1;
        done.removed_bytes += object.bytes;
        done.orphans += u64::from(orphan);
    }
    Ok(done)
}

/// The inventory, and the remote's time.
fn take_inventory(backend: &dyn Backend) -> Result<(Inventory, u64)> {
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let clock = format!("{CLOCK}{nanos}");
    backend.set(&clock, b"1")?;
    let inventory = Inventory::take(backend);
    let removed = backend.delete(&clock);
    let inventory = inventory?;
    removed?;
    // Only the value that was just written shows the current time: other temporary values may be
    // old.
    let now = inventory.unfinished.iter().find(|left| left.name == clock).map(|left| left.written);
    let now = now
        .ok_or_else(|| Error::retry("the remote does not list an object that was just written"))?;
    Ok((inventory, now))
}

/// The properties of an object that decide whether it is removed.
struct ObjectState<'a> {
    object: &'a Object,
    /// When the object, or an object that continues it, was last written.
    last_needed: u64,
    /// Number of preceding objects in the prompt.
    depth: usize,
    /// Whether the preceding object is missing.
    orphan: bool,
}

/// The state of every object, and the number of headers that could not be read.
fn object_states<'a>(
    backend: &dyn Backend,
    inventory: &'a Inventory,
    keys: Option<&KeyRing>,
) -> Result<(Vec<ObjectState<'a>>, u64)> {
    let objects = &inventory.objects;
    // Objects by form, scope and last page. Objects of different lengths may end with the same
    // page.
    let mut ends: HashMap<(Form, &str, &str), Vec<usize>> = HashMap::new();
    for (at, object) in objects.iter().enumerate() {
        ends.entry((object.form, &object.scope, &object.last)).or_default().push(at);
    }
    let (parents, unreadable) = parent_hashes(backend, objects, keys)?;
    let found = |at: usize| -> &[usize] {
        let parent = parents[at].as_deref();
        parent
            .and_then(|parent| ends.get(&(objects[at].form, objects[at].scope.as_str(), parent)))
            .map_or(&[], Vec::as_slice)
    };
    let mut states: Vec<_> = objects
        .iter()
        .enumerate()
        .map(|(at, object)| ObjectState {
            object,
            last_needed: object.written,
            depth: 0,
            orphan: parents[at].is_some() && found(at).is_empty(),
        })
        .collect();
    // Begin with the objects that were written last, so that `last_needed` of each object is raised
    // at most once, even if headers are forged.
    let mut youngest_first: Vec<usize> = (0..objects.len()).collect();
    youngest_first.sort_by_key(|&at| std::cmp::Reverse(objects[at].written));
    for at in youngest_first {
        // Raise `last_needed` of the preceding objects, up to the first whose `last_needed` is not
        // before `written`: the objects before that one were raised earlier.
        let written = objects[at].written;
        let mut left: Vec<usize> = found(at).to_vec();
        while let Some(above) = left.pop() {
            if states[above].last_needed < written {
                states[above].last_needed = written;
                left.extend(found(above));
            }
        }
    }
    let depths = depths(objects.len(), |at| found(at).first().copied());
    for (states, depth) in states.iter_mut().zip(depths) {
        states.depth = depth;
    }
    Ok((states, unreadable))
}

/// Returns for each object the number of objects before it in its prompt; `above` returns the
/// preceding object. Visits each object once. Forged headers may form a cycle: the object that
/// closes the cycle gets the depth 1, as if its preceding object began the prompt.
fn depths(objects: usize, above: impl Fn(usize) -> Option<usize>) -> Vec<usize> {
    let mut depths: Vec<Option<usize>> = vec![None; objects];
    let mut path = Vec::new();
    for at in 0..objects {
        let mut next = Some(at);
        let mut depth = loop {
            let Some(at) = next else { break 0 };
            if let Some(known) = depths[at] {
                break known + 1;
            }
            depths[at] = Some(0);
            path.push(at);
            next = above(at);
        };
        while let Some(at) = path.pop() {
            depths[at] = Some(depth);
            depth += 1;
        }
    }
    depths.into_iter().map(Option::unwrap_or_default).collect()
}

/// The hash of the page before each object, if any, and the number of headers that could not be
/// read.
fn parent_hashes(
    backend: &dyn Backend,
    objects: &[Object],
    keys: Option<&KeyRing>,
) -> Result<(Vec<Option<String>>, u64)> {
    let mut parents = Vec::with_capacity(objects.len());
    let mut failures = ReadFailures::default();
    for some in objects.chunks(HEADERS_AT_ONCE) {
        let requests: Vec<_> = some
            .iter()
            .map(|object| (object.name.as_str(), Some(0..object.header_bytes())))
            .collect();
        for (object, head) in some.iter().zip(backend.get_batch(&requests)) {
            // A damaged, removed or unauthentic object counts as the beginning of a prompt. Without
            // a key, a writer that may not delete can use forged headers to choose which objects
            // are removed.
            let head = failures.tolerate(head)?.ok().flatten();
            let scope = object.scope_id().unwrap_or_default();
            let verify = keys.map(|keys| (keys, &scope));
            let contents = head.and_then(|head| Contents::read(&head, object.form, verify).ok());
            parents.push(contents.and_then(|Contents { header, .. }| {
                // A sealed header that belongs to another object's name is not authentic either.
                let last = header.keys.last()?;
                let named = packing::name(object.form, &header.scope, last, header.keys.len());
                if named != object.name {
                    return None;
                }
                let hash = PageHash::of(&header.scope, header.parent.as_deref()?);
                Some(hash.0.iter().fold(String::new(), |mut text, byte| {
                    let _ = write!(text, "{byte:02x}");
                    text
                }))
            }));
        }
    }
    Ok((parents, failures.total()))
}

#[cfg(test)]
mod tests {
    use super::depths;

    #[test]
    fn depths_count_ancestors_and_survive_cycles() {
        let above = [None, Some(0), Some(3), Some(1), Some(1)];
        assert_eq!(depths(5, |at| above[at]), [0, 1, 3, 2, 2]);
        let cycle = [Some(1), Some(2), Some(0), Some(3)];
        assert_eq!(depths(4, |at| cycle[at]), [3, 2, 1, 1]);
    }
}
