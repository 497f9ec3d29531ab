//! A backend in the memory of this process: for tests and trials of a remote.

use super::backend::{Backend, Listed};
use parking_lot::RwLock;
use ritornello_format::Result;
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{SystemTime, UNIX_EPOCH};

/// Values by name, each with the time of its last write in seconds since 1970.
#[derive(Debug, Default)]
pub struct MemoryBackend {
    values: RwLock<BTreeMap<String, (u64, Vec<u8>)>>,
}

impl Backend for MemoryBackend {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>> {
        let values = self.values.read();
        let Some((_, value)) = values.get(name) else { return Ok(None) };
        let range = range.unwrap_or(0..u64::MAX);
        let end = (value.len() as u64).min(range.end);
        Ok(Some(value[range.start.min(end) as usize..end as usize].to_vec()))
    }

    fn exists(&self, name: &str) -> Result<bool> {
        Ok(self.values.read().contains_key(name))
    }

    fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        self.values.write().insert(name.to_owned(), (now, value.to_vec()));
        Ok(())
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.values.write().remove(name);
        Ok(())
    }

    fn list(&self, prefix: &str, each: &mut dyn FnMut(Listed)) -> Result<()> {
        let listed: Vec<Listed> = self
            .values
            .read()
            .range(prefix.to_owned()..)
            .take_while(|(name, _)| name.starts_with(prefix))
            .map(|(name, (written, value))| Listed {
                name: name.clone(),
                bytes: value.len() as u64,
                written: *written,
            })
            .collect();
        listed.into_iter().for_each(each);
        Ok(())
    }
}
