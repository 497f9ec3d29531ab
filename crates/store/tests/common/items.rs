//! Pages of any length, also longer than 16 MiB, whose bytes are made once and compared often.

use super::*;

/// Pages put under one sequence of keys.
pub struct Item {
    pub scope: Scope,
    pub keys: Vec<Vec<u8>>,
    pub pages: Vec<Vec<u8>>,
}

impl Item {
    /// Pages of `bytes` each under the keys of sequence `name`.
    pub fn new(model: &str, name: u64, bytes: u64, is_chained: bool, pages: usize) -> Self {
        let scope = Scope::opaque(model, bytes, is_chained);
        let keys = sequence(name, pages);
        let pages = keys.iter().map(|key| repeated(model, key, bytes as usize)).collect();
        Self { scope, keys, pages }
    }

    /// The page at `at` alone.
    pub fn single(&self, at: usize) -> Self {
        let (keys, pages) = (vec![self.keys[at].clone()], vec![self.pages[at].clone()]);
        Self { scope: self.scope.clone(), keys, pages }
    }

    pub fn put(&self, store: &Store) -> Result<Outcome> {
        self.put_with(store, &PutOptions::default())
    }

    pub fn put_with(&self, store: &Store, options: &PutOptions) -> Result<Outcome> {
        let pages: Vec<&[u8]> = self.pages.iter().map(Vec::as_slice).collect();
        let source = BorrowedPages::new(&pages);
        store.put_batch(&self.scope, &refs(&self.keys), &source, options, &Control::default())
    }

    /// Gets the pages and checks every byte of the pages that arrive.
    pub fn get(&self, store: &Store) -> Result<Outcome> {
        let mut out: Vec<Vec<u8>> = self.pages.iter().map(|page| vec![0xEE; page.len()]).collect();
        let mut slices: Vec<&mut [u8]> = out.iter_mut().map(Vec::as_mut_slice).collect();
        let target = BorrowedPagesMut::new(&mut slices);
        let keys = refs(&self.keys);
        let outcome = store.get_batch(&self.scope, &keys, &target, &Control::default())?;
        drop(target);
        for (at, ok) in outcome.ok.iter().enumerate() {
            let is_right = !ok || out[at] == self.pages[at];
            assert!(is_right, "WRONG BYTES in page {at} of {}", self.scope.model);
        }
        Ok(outcome)
    }

    /// The numbers of the volumes that the pages are on.
    pub fn volumes(&self, open: &Open) -> Vec<u8> {
        let catalog = open.core.catalog_for(ClientId::LOCAL, "");
        let reference = catalog.resolve(&self.scope, false).unwrap().unwrap();
        let located = catalog.begin_read(reference, &refs(&self.keys)).unwrap();
        catalog.release(located.lease).unwrap();
        let extents = located.runs.iter().flat_map(|run| &run.place.extents);
        let mut volumes: Vec<u8> = extents.map(|extent| extent.segment.volume()).collect();
        volumes.sort_unstable();
        volumes.dedup();
        volumes
    }
}

/// The page of `key`. The bytes of a long page repeat after 65,537 bytes: one byte more than 16
/// units of 4 KiB, so that all units of the page differ.
fn repeated(model: &str, key: &[u8], length: usize) -> Vec<u8> {
    let mut bytes = page(&Scope::opaque(model, length.min(65_537) as u64, true), key);
    let period = bytes.len();
    bytes.resize(length, 0);
    for at in (period..length).step_by(period) {
        let (done, rest) = bytes.split_at_mut(at);
        let part = rest.len().min(period);
        rest[..part].copy_from_slice(&done[..part]);
    }
    bytes
}
