//! Reads every object of a remote, and says which ones no reader would take.

use super::backend::Backend;
use super::census::{Census, Object};
use super::object::{Contents, Part};
use super::spans;
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
    /// Objects that went while they were read: somebody collects.
    pub gone: u64,
}

/// Reads the objects of `census`, and removes those that are damaged if `repair`: whoever has the
/// pages writes them again when it puts their prompt. `each` hears of every object that is done.
///
/// # Errors
/// If the remote cannot be read.
pub fn fsck(
    backend: &dyn Backend,
    census: &Census,
    repair: bool,
    each: &mut dyn FnMut(&Object),
) -> Result<RemoteCheck> {
    let mut check = RemoteCheck::default();
    for objects in census.objects.chunks(AT_ONCE) {
        let asked: Vec<_> = objects.iter().map(|object| (object.name.as_str(), None)).collect();
        for (object, read) in objects.iter().zip(backend.get_batch(&asked)) {
            each(object);
            let Some(value) = read? else {
                check.gone += 1;
                continue;
            };
            check.objects += 1;
            check.pages += u64::from(object.pages);
            check.bytes += value.len() as u64;
            if let Err(wrong) = examine(object, &value) {
                if repair {
                    backend.delete(&object.name)?;
                    check.removed += 1;
                }
                check.damaged.push((object.name.clone(), wrong));
            }
        }
    }
    Ok(check)
}

fn examine(object: &Object, value: &[u8]) -> std::result::Result<(), String> {
    let contents = Contents::read(value).map_err(|error| error.to_string())?;
    let header = &contents.header;
    let named = header.keys.last().map(|last| spans::name(&header.scope, last, header.keys.len()));
    if named.as_deref() != Some(&object.name) {
        return Err("it holds other pages than its name says".to_owned());
    }
    // No header says more than PAGE_BYTES_MAX.
    let mut page = vec![0; header.page_bytes as usize];
    let part = Part { at: 0, bytes: value };
    match (0..header.keys.len()).find(|&at| contents.unpack(&part, at..at + 1, &mut page) != 1) {
        None => Ok(()),
        Some(at) => Err(format!("page {at} of {} is damaged", header.keys.len())),
    }
}
