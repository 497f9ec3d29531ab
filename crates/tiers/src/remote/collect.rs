//! Keeps a remote small: removes what nobody wrote or added to for long, or what is most so.
//!
//! A prompt is found from its beginning on, so an object is as young as the youngest one behind it:
//! ends go before what they hang on. What hangs on nothing (its beginning was removed, or never came)
//! goes first. The objects' headers name what they hang on; they are read only if something goes.
//!
//! **Beside readers and writers.** An object goes whole. A reader that had found it reads nothing, and
//! computes. A writer that had found it does not write it again until it has forgotten that, after ten
//! minutes; what it adds behind it meanwhile hangs on nothing. Both cost hits, neither a byte: names
//! follow from contents, so what is written again is the same. What is younger than the grace stays in
//! any case. Two collectors remove the same, twice. Ages are by the remote's clock, which is asked for
//! by writing an object. What writers that were killed left unfinished goes after a day.

use super::backend::Backend;
use super::inventory::{CLOCK, Inventory, Object};
use super::keyring::KeyRing;
use super::object::Contents;
use super::read_failures::ReadFailures;
use super::spans::{self, Form};
use ritornello_format::{Error, PageHash, Result};
use std::collections::HashMap;
use std::fmt::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Headers that are asked for at once.
const HEADERS_AT_ONCE: usize = 64;

/// Nobody writes one object for so long, or wants to know what time it was.
const UNFINISHED_FOR: Duration = Duration::from_secs(24 * 3600);

/// What may stay.
#[derive(Clone, Copy, Debug)]
pub struct CollectOptions {
    /// How old objects may become.
    pub max_age: Option<Duration>,
    /// How many bytes may stay.
    pub budget: Option<u64>,
    /// What is younger stays.
    pub grace: Duration,
    /// Removes nothing, and says what would go.
    pub dry_run: bool,
}

/// What went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Objects and bytes that there were.
    pub objects: u64,
    /// See `objects`.
    pub bytes: u64,
    /// Objects and bytes that went, or would.
    pub removed_objects: u64,
    /// See `removed_objects`.
    pub removed_bytes: u64,
    /// Of the removed objects: those that hung on nothing.
    pub orphans: u64,
    /// Objects that could not be removed.
    pub failed: u64,
    /// Objects whose header could not be read: they continue nothing.
    pub unreadable: u64,
}

/// Removes what may not stay. With `keys` headers of sealed objects are verified: one without a valid
/// seal continues nothing. `each` hears of everything that goes.
///
/// # Errors
/// If the remote cannot be listed, read (eight headers in a row fail) or written; `Invalid` if it
/// cannot list or delete.
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
    // What hangs on nothing, then what is oldest; of equals what lies deepest.
    states.sort_by_key(|at| (!at.orphan, at.last_needed, std::cmp::Reverse(at.depth)));
    for ObjectState { object, last_needed, orphan, .. } in states {
        let goes = too_old(last_needed) || done.removed_bytes < over;
        if !goes || age(last_needed) < options.grace {
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

/// What there is, and the remote's time.
fn take_inventory(backend: &dyn Backend) -> Result<(Inventory, u64)> {
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let clock = format!("{CLOCK}{nanos}");
    backend.set(&clock, b"1")?;
    let inventory = Inventory::take(backend);
    let removed = backend.delete(&clock);
    let inventory = inventory?;
    removed?;
    // What else is there may be from a clock that was wrong.
    let now = inventory.unfinished.iter().find(|left| left.name == clock).map(|left| left.written);
    let now = now.ok_or_else(|| Error::retry("the remote does not list what was just written"))?;
    Ok((inventory, now))
}

/// How an object stands.
struct ObjectState<'a> {
    object: &'a Object,
    /// When it or something behind it was written last.
    last_needed: u64,
    /// Objects in front of it.
    depth: usize,
    /// It is not a beginning, and what it hangs on is not there.
    orphan: bool,
}

/// How every object stands, and how many headers could not be read.
fn object_states<'a>(
    backend: &dyn Backend,
    inventory: &'a Inventory,
    keys: Option<&KeyRing>,
) -> Result<(Vec<ObjectState<'a>>, u64)> {
    let objects = &inventory.objects;
    // By form, scope and last page: objects of several lengths may end there.
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
    // The youngest first, so that each object is given a younger time once, whatever headers say.
    let mut youngest_first: Vec<usize> = (0..objects.len()).collect();
    youngest_first.sort_by_key(|&at| std::cmp::Reverse(objects[at].written));
    for at in youngest_first {
        // Upwards until what is there is as young: what made it so goes on from there.
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

/// How many objects are in front of each, where `above` says the next one; each is visited once.
/// Headers that lie may go round in circles: an object on the way counts as a beginning then.
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

/// The hash of the page before each object, where it has one, and how many could not be read.
fn parent_hashes(
    backend: &dyn Backend,
    objects: &[Object],
    keys: Option<&KeyRing>,
) -> Result<(Vec<Option<String>>, u64)> {
    let mut parents = Vec::with_capacity(objects.len());
    let mut failures = ReadFailures::default();
    for some in objects.chunks(HEADERS_AT_ONCE) {
        let asked: Vec<_> = some
            .iter()
            .map(|object| (object.name.as_str(), Some(0..object.header_bytes())))
            .collect();
        for (object, head) in some.iter().zip(backend.get_batch(&asked)) {
            // One that is damaged, gone or not authentic stands alone. Without a key a writer that may not
            // delete can choose by forged headers which objects are removed.
            let head = failures.tolerate(head)?.ok().flatten();
            let scope = object.scope_id().unwrap_or_default();
            let verify = keys.map(|keys| (keys, &scope));
            let contents = head.and_then(|head| Contents::read(&head, object.form, verify).ok());
            parents.push(contents.and_then(|Contents { header, .. }| {
                // A sealed header under the name of another object is not authentic either.
                let last = header.keys.last()?;
                let named = spans::name(object.form, &header.scope, last, header.keys.len());
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
    fn depths_count_objects_in_front_and_end_in_circles() {
        let above = [None, Some(0), Some(3), Some(1), Some(1)];
        assert_eq!(depths(5, |at| above[at]), [0, 1, 3, 2, 2]);
        let circle = [Some(1), Some(2), Some(0), Some(3)];
        assert_eq!(depths(4, |at| circle[at]), [3, 2, 1, 1]);
    }
}
