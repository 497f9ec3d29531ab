//! The contents of a remote, from its listing: objects of this format, objects of other formats,
//! temporary values, and unrecognized names.

use super::backend::{Backend, Listed};
use super::directory::UNFINISHED;
use super::object;
use super::packing::{Form, PAGES_MAX};
use ritornello_format::{KEY_BYTES_MAX, Result, ScopeId};
use std::collections::{BTreeMap, BTreeSet};

/// Prefix of the names of the objects of all versions of the format.
const FAMILY: &str = "ritornello/";
/// Prefix of temporary names that are written to read the remote's clock.
pub(super) const CLOCK: &str = "ritornello/clock-";

/// An object of this format, as its name and the listing describe it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// Name of the object.
    pub name: String,
    /// Sealed or plain, according to the name.
    pub form: Form,
    /// The id of the scope of its pages, in hexadecimal digits.
    pub scope: String,
    /// The hash of the key of its last page, in hexadecimal digits.
    pub last: String,
    /// Number of pages.
    pub pages: u32,
    /// Length in bytes.
    pub bytes: u64,
    /// Time of writing, in seconds since 1970 by the remote's clock.
    pub written: u64,
}

impl Object {
    /// Returns an upper bound of the offset of the object's first page.
    pub(super) fn header_bytes(&self) -> u64 {
        object::first_page_offset(self.form, (0..self.pages as usize).map(|_| KEY_BYTES_MAX))
    }

    /// The id of the scope, according to the object's name.
    pub(super) fn scope_id(&self) -> Option<ScopeId> {
        let mut scope = ScopeId::default();
        for (byte, at) in scope.0.iter_mut().zip((0..).step_by(2)) {
            *byte = u8::from_str_radix(self.scope.get(at..at + 2)?, 16).ok()?;
        }
        Some(scope)
    }
}

/// The names of a remote that begin with `ritornello/`, by kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// Objects of this version of the format.
    pub objects: Vec<Object>,
    /// Number and bytes of the objects of other versions, by version.
    pub others: BTreeMap<String, (u64, u64)>,
    /// The first [`Inventory::UNRECOGNIZED_MAX`] names that no version uses.
    pub unrecognized: Vec<String>,
    /// Number of all names that no version uses.
    pub unrecognized_names: u64,
    /// Temporary values: reads of the remote's clock, and unfinished writes.
    pub unfinished: Vec<Listed>,
}

impl Inventory {
    /// Maximum unrecognized names listed; further names are only counted, because a writer of the
    /// remote can create any number.
    pub const UNRECOGNIZED_MAX: usize = 1000;

    /// Lists the names in `backend` that begin with `ritornello/`.
    ///
    /// # Errors
    /// Errors of [`Backend::list`].
    pub fn take(backend: &dyn Backend) -> Result<Self> {
        let mut inventory = Self::default();
        backend.list(FAMILY, &mut |found| inventory.add(found))?;
        inventory.objects.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(inventory)
    }

    #[cfg(feature = "fuzzing")]
    pub(super) fn of(listed: impl IntoIterator<Item = Listed>) -> Self {
        let mut inventory = Self::default();
        listed.into_iter().for_each(|found| inventory.add(found));
        let _ = (inventory.bytes(), inventory.pages(), inventory.scopes());
        inventory
    }

    /// Number of objects of one form.
    #[must_use]
    pub fn objects_of(&self, form: Form) -> u64 {
        self.objects.iter().filter(|object| object.form == form).count() as u64
    }

    /// Bytes of this version's objects.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.objects.iter().fold(0, |sum, object| object.bytes.saturating_add(sum))
    }

    /// Pages of this version's objects; a page in two objects counts twice.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.objects.iter().map(|object| u64::from(object.pages)).sum()
    }

    /// Number of scopes of this version's objects.
    #[must_use]
    pub fn scopes(&self) -> usize {
        self.objects.iter().map(|object| object.scope.as_str()).collect::<BTreeSet<_>>().len()
    }

    fn add(&mut self, found: Listed) {
        let file = found.name.rsplit('/').next().unwrap_or_default();
        if found.name.starts_with(CLOCK) || file.starts_with(UNFINISHED) {
            self.unfinished.push(found);
            return;
        }
        match read(&found) {
            Some(object) => self.objects.push(object),
            None => match version(&found.name) {
                Some(version) => {
                    let (objects, bytes) = self.others.entry(version).or_default();
                    *objects += 1;
                    *bytes = bytes.saturating_add(found.bytes);
                }
                None => {
                    self.unrecognized_names += 1;
                    if self.unrecognized.len() < Self::UNRECOGNIZED_MAX {
                        self.unrecognized.push(found.name);
                    }
                }
            },
        }
    }
}

fn read(found: &Listed) -> Option<Object> {
    let of = |form: Form| Some((form, found.name.strip_prefix(form.root())?));
    let (form, rest) = Form::ALL.into_iter().find_map(of)?;
    let (scope, rest) = rest.split_once('/')?;
    let (last, pages) = rest.split_once('.')?;
    let digit = |c: u8| matches!(c, b'0'..=b'9' | b'a'..=b'f');
    let hex = |text: &str| text.len() == 32 && text.bytes().all(digit);
    let fits = |pages: &u32| pages.is_power_of_two() && u64::from(*pages) <= PAGES_MAX;
    // The number must be canonical, as writers produce it: without a sign and without leading
    // zeros.
    let is_canonical = |number: &u32| number.to_string() == pages;
    let pages = pages.parse().ok().filter(fits).filter(is_canonical)?;
    (hex(scope) && hex(last)).then(|| Object {
        name: found.name.clone(),
        form,
        scope: scope.to_owned(),
        last: last.to_owned(),
        pages,
        bytes: found.bytes,
        written: found.written,
    })
}

/// The version in a name of a different format: at most three digits, to bound the number of
/// versions that a writer can invent.
fn version(name: &str) -> Option<String> {
    let (version, _) = name.strip_prefix(FAMILY)?.split_once('/')?;
    let number = (1..=3).contains(&version.len()) && version.bytes().all(|c| c.is_ascii_digit());
    let known = Form::ALL.into_iter().any(|form| name.starts_with(form.root()));
    (number && !known).then(|| version.to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::MemoryBackend;
    use super::*;

    #[test]
    fn names_are_classified() {
        let backend = MemoryBackend::default();
        let hex = "0123456789abcdef0123456789abcdef";
        let good = format!("ritornello/3/{hex}/{hex}.32");
        let sealed = format!("ritornello/4/{hex}/{hex}.8");
        for name in [
            good.as_str(),
            &format!("ritornello/3/{hex}/{hex}.33"),
            &format!("ritornello/3/{hex}/{hex}"),
            &format!("ritornello/3/{hex}/{hex}.256"),
            &format!("ritornello/4/{hex}/{hex}.+8"),
            &format!("ritornello/4/{hex}/{hex}.08"),
            &format!("ritornello/4/{hex}/what.ever"),
            sealed.as_str(),
            &format!("ritornello/5/{hex}/what.ever"),
            "ritornello/1234/x",
            "ritornello/clock-7",
            &format!("ritornello/3/{hex}/.new-me-7"),
            "ritornello/readme",
            "others/1/x",
        ] {
            backend.set(name, b"12345").unwrap();
        }
        let inventory = Inventory::take(&backend).unwrap();
        assert_eq!(
            inventory.objects.iter().map(|o| o.name.as_str()).collect::<Vec<_>>(),
            [good, sealed]
        );
        assert_eq!((inventory.pages(), inventory.bytes(), inventory.scopes()), (40, 10, 1));
        assert_eq!(Form::ALL.map(|form| inventory.objects_of(form)), [1, 1]);
        assert_eq!(inventory.objects[1].scope_id().unwrap().to_string(), hex);
        assert_eq!(inventory.others, BTreeMap::from([("5".to_owned(), (1, 5))]));
        assert_eq!((inventory.unrecognized.len(), inventory.unrecognized_names), (8, 8));
        assert_eq!(inventory.unfinished.len(), 2);
    }
}
