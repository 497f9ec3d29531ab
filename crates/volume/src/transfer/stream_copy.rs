//! Copies bytes past the processor's caches, to memory that this process does not read next.
//!
//! An ordinary store to memory that is not in a cache first reads the cache line, so a copy of many
//! MiB moves every byte of the target twice. Streaming stores write whole lines and read none of
//! them. The target of a read is used next by an engine, which copies it to a GPU or reads it after
//! other pages have displaced it from the caches.

/// Copies `bytes` bytes from `from` to `to`. The copy is visible to other threads as after an
/// ordinary copy.
///
/// # Safety
/// The bytes at `from` are readable, the bytes at `to` are writable, the two do not overlap, and
/// nothing else accesses the bytes at `to` during the call.
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    if bytes >= x86::BYTES_MIN && std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: promised by the caller; the processor has the feature of the function.
        unsafe { x86::copy(from, to, bytes) };
        return;
    }
    // SAFETY: promised by the caller.
    unsafe { to.copy_from_nonoverlapping(from, bytes) };
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};

    const LANE: usize = 32;
    /// Bytes per step: the streaming stores of a step fill whole cache lines one after another.
    const STEP: usize = 4 * LANE;
    /// Minimum bytes for which streaming is worth its fence.
    pub(super) const BYTES_MIN: usize = 4096;

    /// # Safety
    /// The conditions of [`copy`](super::copy) apply. `bytes` is not less than [`BYTES_MIN`].
    #[target_feature(enable = "avx")]
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
        let head = to.align_offset(STEP).min(bytes);
        let steps = (bytes - head) / STEP;
        // SAFETY: all accesses are inside the `bytes` bytes at `from` and at `to`; `to + head` is a
        // multiple of `STEP`, as streaming stores demand.
        unsafe {
            to.copy_from_nonoverlapping(from, head);
            for step in 0..steps {
                let at = head + step * STEP;
                let (from, to) = (from.add(at).cast::<__m256i>(), to.add(at).cast::<__m256i>());
                let lanes = [
                    _mm256_loadu_si256(from),
                    _mm256_loadu_si256(from.add(1)),
                    _mm256_loadu_si256(from.add(2)),
                    _mm256_loadu_si256(from.add(3)),
                ];
                for (lane, value) in lanes.into_iter().enumerate() {
                    _mm256_stream_si256(to.add(lane), value);
                }
            }
            let at = head + steps * STEP;
            to.add(at).copy_from_nonoverlapping(from.add(at), bytes - at);
        }
        // Streaming stores are not ordered with the stores that publish the copy to other threads.
        _mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn copies_exactly_the_named_bytes(
            from in prop::collection::vec(any::<u8>(), 0..20_000),
            (skip, offset) in (0usize..300, 0usize..300),
        ) {
            let from = &from[skip.min(from.len())..];
            let mut to = vec![0xee; offset + from.len() + 200];
            let mut expected = to.clone();
            expected[offset..][..from.len()].copy_from_slice(from);
            // SAFETY: `to` has room for `from` after `offset`, and both are separate vectors.
            unsafe { copy(from.as_ptr(), to.as_mut_ptr().add(offset), from.len()) };
            prop_assert!(to == expected);
        }
    }
}
