//! The checksums of a page's slices, which are contiguous on disk.

use ritornello_format::{Slice, SliceChecksum};

/// Computes the checksums of the slices of one page from the page's bytes as stored on disk, in
/// order.
pub(super) struct SliceSums<'a> {
    key: &'a [u8],
    generation: u64,
    /// Length of each slice on disk, at least one byte.
    lengths: Vec<u32>,
    /// Bytes of the current slice that are not added yet.
    left: usize,
    open: SliceChecksum,
    done: Vec<u64>,
}

impl<'a> SliceSums<'a> {
    pub(super) fn new(key: &'a [u8], generation: u64, slices: &[Slice]) -> Self {
        let lengths: Vec<u32> = slices.iter().map(|slice| slice.bytes).collect();
        Self {
            key,
            generation,
            left: lengths.first().map_or(0, |length| *length as usize),
            lengths,
            open: SliceChecksum::new(key, generation, 0),
            done: Vec::with_capacity(slices.len()),
        }
    }

    /// Adds the next bytes. Bytes after the last slice are padding and are ignored.
    pub(super) fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && self.left > 0 {
            let (now, rest) = bytes.split_at(bytes.len().min(self.left));
            self.open.update(now);
            self.left -= now.len();
            bytes = rest;
            if self.left == 0 {
                let next = self.done.len() + 1;
                let open = SliceChecksum::new(self.key, self.generation, next as u16);
                self.done.push(std::mem::replace(&mut self.open, open).finish());
                self.left = self.lengths.get(next).map_or(0, |length| *length as usize);
            }
        }
    }

    /// The checksums of the complete slices.
    pub(super) fn done(&self) -> &[u64] {
        &self.done
    }
}

/// Total length of slices in bytes.
pub(super) fn total(slices: &[Slice]) -> u64 {
    slices.iter().map(|slice| u64::from(slice.bytes)).sum()
}

/// The slices of a raw page of `page_bytes`, in `count` equal parts.
pub(super) fn raw(count: u16, page_bytes: u64) -> impl Iterator<Item = Slice> {
    let count = count.max(1);
    (0..count).map(move |number| {
        let part = Slice::part(number, count, page_bytes);
        Slice { bytes: (part.end - part.start) as u32, codec: Slice::RAW, checksum: 0 }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slice_checksums_do_not_depend_on_update_sizes() {
        let bytes: Vec<u8> = (0..100).collect();
        let slices: Vec<Slice> =
            [30, 1, 69].map(|bytes| Slice { bytes, codec: Slice::RAW, checksum: 0 }).to_vec();
        let mut expected = Vec::new();
        for (number, range) in [0..30, 30..31, 31..100].into_iter().enumerate() {
            let mut sum = SliceChecksum::new(b"key-0001", 7, number as u16);
            sum.update(&bytes[range]);
            expected.push(sum.finish());
        }
        for step in [1, 29, 30, 31, 100] {
            let mut sums = SliceSums::new(b"key-0001", 7, &slices);
            bytes.chunks(step).for_each(|part| sums.update(part));
            sums.update(b"padding");
            assert_eq!(sums.done(), expected, "{step}");
        }
    }
}
