//! What lies in a remote, by its listing: objects of this format, of others, and what is none.

use super::backend::{Backend, Listed};
use super::directory::UNFINISHED;
use super::spans::ROOT;
use ritornello_format::{Result, RunHeader, UNIT};
use std::collections::{BTreeMap, BTreeSet};

/// What the names of all formats begin with.
const FAMILY: &str = "ritornello/";
/// What is written for a moment to ask the remote what time it is.
pub(super) const CLOCK: &str = "ritornello/clock-";

/// An object of this format, as far as its name tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// Its name.
    pub name: String,
    /// The scope of its pages, in hexadecimal digits.
    pub scope: String,
    /// The hash of its last page, in hexadecimal digits.
    pub last: String,
    /// How many pages it holds.
    pub pages: u32,
    /// Its length in bytes.
    pub bytes: u64,
    /// When it was written, seconds since 1970 by the remote's clock.
    pub written: u64,
}

impl Object {
    /// No header of so many pages is longer.
    pub(super) fn header_bytes(&self) -> u64 {
        let longest = (0..self.pages).map(|_| ritornello_format::KEY_BYTES_MAX);
        u64::from(RunHeader::units(longest, 1)) * UNIT
    }
}

/// Everything in a remote.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// What this version of the format reads.
    pub objects: Vec<Object>,
    /// Objects and bytes of other versions, by version.
    pub others: BTreeMap<String, (u64, u64)>,
    /// Names that no version would give.
    pub strange: Vec<String>,
    /// What is written for a while only: the time it was asked for, values that are not finished.
    pub unfinished: Vec<Listed>,
}

impl Census {
    /// Lists all that `backend` holds.
    ///
    /// # Errors
    /// Those of [`Backend::list`].
    pub fn take(backend: &dyn Backend) -> Result<Self> {
        let mut census = Self::default();
        backend.list(FAMILY, &mut |found| census.add(found))?;
        census.objects.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(census)
    }

    /// Bytes of this version's objects.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.objects.iter().map(|object| object.bytes).sum()
    }

    /// Pages of this version's objects. One that lies in two objects counts twice.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.objects.iter().map(|object| u64::from(object.pages)).sum()
    }

    /// Scopes of this version's objects.
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
                    *bytes += found.bytes;
                }
                None => self.strange.push(found.name),
            },
        }
    }
}

fn read(found: &Listed) -> Option<Object> {
    let (scope, rest) = found.name.strip_prefix(ROOT)?.split_once('/')?;
    let (last, pages) = rest.split_once('.')?;
    let hex = |text: &str| text.len() == 32 && text.bytes().all(|c| c.is_ascii_hexdigit());
    let pages =
        pages.parse().ok().filter(|pages: &u32| pages.is_power_of_two() && *pages <= 1 << 16)?;
    (hex(scope) && hex(last)).then(|| Object {
        name: found.name.clone(),
        scope: scope.to_owned(),
        last: last.to_owned(),
        pages,
        bytes: found.bytes,
        written: found.written,
    })
}

/// The version of a name, if it is another one.
fn version(name: &str) -> Option<String> {
    let (version, _) = name.strip_prefix(FAMILY)?.split_once('/')?;
    let other = version.bytes().all(|c| c.is_ascii_digit()) && !name.starts_with(ROOT);
    other.then(|| version.to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::MemoryBackend;
    use super::*;

    #[test]
    fn names_are_told_apart() {
        let backend = MemoryBackend::default();
        let hex = "0123456789abcdef0123456789abcdef";
        let good = format!("ritornello/1/{hex}/{hex}.32");
        for name in [
            good.as_str(),
            &format!("ritornello/1/{hex}/{hex}.33"),
            &format!("ritornello/1/{hex}/{hex}"),
            &format!("ritornello/2/{hex}/what.ever"),
            "ritornello/clock-7",
            &format!("ritornello/1/{hex}/.new-me-7"),
            "ritornello/readme",
            "others/1/x",
        ] {
            backend.set(name, b"12345").unwrap();
        }
        let census = Census::take(&backend).unwrap();
        assert_eq!(census.objects.iter().map(|o| o.name.as_str()).collect::<Vec<_>>(), [good]);
        assert_eq!((census.pages(), census.bytes(), census.scopes()), (32, 5, 1));
        assert_eq!(census.others, BTreeMap::from([("2".to_owned(), (1, 5))]));
        assert_eq!(census.strange.len(), 3);
        assert_eq!(census.unfinished.len(), 2);
    }
}
