//! The addresses of a page's bytes in an engine's memory, and the units in which they are moved.
//! `kernels/kv.cu` reads the tables that this module builds.

use ritornello_format::{Error, Result};
use std::ops::Range;

/// Bytes that one warp moves at a time.
pub const WORK_UNIT: u32 = 2048;
/// A move by a kernel has fewer work units than this. The kernels count them in 32 bits.
const WORK_MAX: u64 = 1 << 31;
/// Maximum length of a span in bytes, and so of a page's part in one tensor.
const SPAN_BYTES_MAX: u32 = 1 << 30;
/// Maximum spans of a page: enough for two tensors per layer and 2,048 layers.
const SPANS_MAX: usize = 4096;

/// One tensor of an engine's KV memory: block `b` has `bytes` bytes at `base + b * stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Address of block 0.
    pub base: u64,
    /// Contiguous bytes of one block.
    pub bytes: u32,
    /// Distance between blocks in bytes.
    pub stride: u64,
}

/// A [`Span`] as the kernels read it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanEntry {
    /// Address of block 0.
    pub base: u64,
    /// Distance between blocks in bytes.
    pub stride: u64,
    /// Offset of the span's bytes in a page.
    pub offset: u64,
    /// Contiguous bytes of one block.
    pub bytes: u32,
    /// Number of work units of all spans before this span.
    pub first_unit: u32,
}

/// One page of a move, as the kernels read it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoveEntry {
    /// Number of the block in the engine's memory.
    pub block: u32,
    /// Offset of the slot in the arena, in units of 4 KiB.
    pub slot: u32,
}

/// A table entry. Its memory is copied to the device as it is, so it has no padding.
pub(crate) trait Entry: Copy {}
impl Entry for SpanEntry {}
impl Entry for MoveEntry {}

const _: () = assert!(size_of::<SpanEntry>() == 32 && size_of::<MoveEntry>() == 8);

/// The bytes of a table of entries, as they are copied to the device.
pub(crate) fn as_bytes<T: Entry>(table: &[T]) -> &[u8] {
    // SAFETY: entries have no padding (asserted above: their fields have 32 and 8 bytes).
    unsafe { std::slice::from_raw_parts(table.as_ptr().cast(), size_of_val(table)) }
}

/// The largest word in which the bytes of a layout can be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// 16 bytes.
    B16,
    /// 8 bytes.
    B8,
    /// 4 bytes.
    B4,
    /// Single bytes.
    B1,
}

impl Word {
    /// The largest word whose length in bytes divides `alignment`.
    #[must_use]
    const fn of(alignment: u64) -> Self {
        match alignment {
            a if a.is_multiple_of(16) => Self::B16,
            a if a.is_multiple_of(8) => Self::B8,
            a if a.is_multiple_of(4) => Self::B4,
            _ => Self::B1,
        }
    }

    /// Length in bytes.
    #[must_use]
    pub const fn bytes(self) -> u32 {
        match self {
            Self::B16 => 16,
            Self::B8 => 8,
            Self::B4 => 4,
            Self::B1 => 1,
        }
    }
}

/// The direction of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From slots to the engine's memory.
    Scatter,
    /// From the engine's memory to slots.
    Gather,
}

/// A kernel of `kernels/kv.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// The direction of the move.
    pub direction: Direction,
    /// The word in which the kernel reads and writes: [`Layout::word`].
    pub word: Word,
}

impl Kernel {
    /// The names of all kernels, in the order of [`Kernel::index`].
    pub const NAMES: [&str; 8] = [
        "kv_scatter_16",
        "kv_scatter_8",
        "kv_scatter_4",
        "kv_scatter_1",
        "kv_gather_16",
        "kv_gather_8",
        "kv_gather_4",
        "kv_gather_1",
    ];

    /// Position in [`Kernel::NAMES`].
    #[must_use]
    pub const fn index(self) -> usize {
        self.direction as usize * 4 + self.word as usize
    }
}

/// The spans of one section of a page, which are consecutive in the layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Positions of the spans in the layout.
    pub spans: Range<usize>,
    /// Number of work units ([`WORK_UNIT`]) of the spans in one page.
    pub units: u32,
}

impl Part {
    /// Number of spans.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.spans.len() as u32
    }

    /// Whether the kernels can move this part of `pages` pages with one launch.
    #[must_use]
    pub fn fits(&self, pages: usize) -> bool {
        (pages as u64).checked_mul(u64::from(self.units)).is_some_and(|units| units < WORK_MAX)
    }
}

/// The layout of a page: its spans in order. In a slot their bytes follow each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    spans: Vec<SpanEntry>,
    blocks: u32,
    page_bytes: u64,
    units: u32,
    word: Word,
}

impl Layout {
    /// The layout of `blocks` blocks in `spans`.
    ///
    /// # Errors
    /// `Invalid` if there is no span or no block, a span is empty, its blocks overlap each other or
    /// another span's blocks, spans of different strides alternate, a span does not fit the address
    /// space, or a limit is exceeded.
    pub fn new(spans: &[Span], blocks: u32) -> Result<Self> {
        if spans.is_empty() || spans.len() > SPANS_MAX || blocks == 0 {
            return Err(Error::invalid("a pool needs 1 to 4,096 spans and at least one block")
                .with("spans", spans.len())
                .with("blocks", blocks));
        }
        let mut entries = Vec::with_capacity(spans.len());
        let (mut offset, mut units, mut alignment) = (0_u64, 0_u32, 0_u64);
        for (number, span) in spans.iter().enumerate() {
            check_span(span, blocks).map_err(|error| error.with("span", number))?;
            entries.push(SpanEntry {
                base: span.base,
                stride: span.stride,
                offset,
                bytes: span.bytes,
                first_unit: units,
            });
            // At most 4,096 spans of at most 2^19 units each: the sum fits 32 bits.
            units += span.bytes.div_ceil(WORK_UNIT);
            // All numbers are multiples of a power of two if and only if their bitwise OR is.
            alignment |= span.base | span.stride | u64::from(span.bytes);
            offset += u64::from(span.bytes);
        }
        check_overlaps(spans, blocks)?;
        // Offsets are sums of lengths, so they are multiples of the same word.
        let word = Word::of(alignment);
        Ok(Self { spans: entries, blocks, page_bytes: offset, units, word })
    }

    /// The spans, as the kernels read them.
    #[must_use]
    pub fn spans(&self) -> &[SpanEntry] {
        &self.spans
    }
    /// Number of blocks in the engine's memory.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.blocks
    }
    /// Length of a page in bytes.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }
    /// The largest word in which all bytes of the layout can be moved.
    #[must_use]
    pub fn word(&self) -> Word {
        self.word
    }

    /// Checks that all blocks exist and, for a scatter, that they differ.
    ///
    /// # Errors
    /// `Invalid` if a block does not exist, or two pages would fill one block.
    pub fn check_blocks(&self, blocks: &[u32], direction: Direction) -> Result<()> {
        if let Some(block) = blocks.iter().find(|block| **block >= self.blocks) {
            return Err(Error::invalid("the pool has no such block")
                .with("block", block)
                .with("blocks", self.blocks));
        }
        if direction == Direction::Scatter {
            let mut sorted = blocks.to_vec();
            sorted.sort_unstable();
            if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
                let twice = Error::invalid("two pages cannot fill one block");
                return Err(twice.with("block", pair[0]));
            }
        }
        Ok(())
    }

    /// The part that consists of all spans of a page.
    #[must_use]
    pub fn whole(&self) -> Part {
        Part { spans: 0..self.spans.len(), units: self.units }
    }

    /// The spans that make up bytes `range` of a page.
    ///
    /// # Errors
    /// `Invalid` if the range is empty, exceeds the page, or does not begin and end where spans
    /// begin or end.
    pub fn part(&self, range: &Range<u64>) -> Result<Part> {
        let first = self.spans.binary_search_by_key(&range.start, |span| span.offset);
        let end = if range.end == self.page_bytes {
            Ok(self.spans.len())
        } else {
            self.spans.binary_search_by_key(&range.end, |span| span.offset)
        };
        match (first, end) {
            (Ok(first), Ok(end)) if first < end => {
                let units_at =
                    |at: usize| self.spans.get(at).map_or(self.units, |span| span.first_unit);
                Ok(Part { spans: first..end, units: units_at(end) - units_at(first) })
            }
            _ => Err(Error::invalid("a section must begin and end between the tensors of a page")
                .with("start", range.start)
                .with("end", range.end)
                .with("page_bytes", self.page_bytes)),
        }
    }

    /// The pieces of `part`, in order: for each its address in block `block`, its offset in the
    /// page, and its length in bytes.
    pub fn pieces(&self, part: &Part, block: u32) -> impl Iterator<Item = (u64, u64, u32)> {
        self.spans[part.spans.clone()]
            .iter()
            .map(move |span| (span.base + u64::from(block) * span.stride, span.offset, span.bytes))
    }
}

/// The address after the last block of a span.
fn end_of(span: &Span, blocks: u32) -> Option<u64> {
    span.stride
        .checked_mul(u64::from(blocks - 1))?
        .checked_add(u64::from(span.bytes))?
        .checked_add(span.base)
}

fn check_span(span: &Span, blocks: u32) -> Result<()> {
    let problem = if span.base == 0 || span.bytes == 0 || span.bytes > SPAN_BYTES_MAX {
        "a span needs an address, and 1 byte to 1 GiB in each block"
    } else if blocks > 1 && span.stride < u64::from(span.bytes) {
        "the blocks of a span overlap: the stride must be at least the bytes of a block"
    } else if end_of(span, blocks).is_none() {
        "a span exceeds the address space"
    } else {
        return Ok(());
    };
    Err(Error::invalid(problem)
        .with("base", span.base)
        .with("bytes", span.bytes)
        .with("stride", span.stride)
        .with("blocks", blocks))
}

/// Refuses spans that share bytes: a scatter would overwrite bytes of one span with bytes of
/// another.
///
/// Spans of one stride may alternate in memory (K and V of one tensor, or all layers of a block).
/// Of two spans with different strides, one must end before the other begins: spans that alternate
/// are refused even if they share no bytes.
fn check_overlaps(spans: &[Span], blocks: u32) -> Result<()> {
    let mut sorted: Vec<&Span> = spans.iter().collect();
    sorted.sort_by_key(|span| span.base);
    // The latest spans that alternate in memory: their stride, the address of the first of them,
    // and the largest address at which one of them ends.
    let mut group: Option<(u64, u64, u64)> = None;
    let mut end_of_blocks = 0;
    for span in sorted {
        let end = end_of(span, blocks).unwrap_or(u64::MAX);
        let block_end = span.base + u64::from(span.bytes);
        match group {
            Some((stride, first, last)) if span.base < last => {
                let is_apart = stride == span.stride
                    && span.base >= end_of_blocks
                    && (blocks == 1 || block_end - first <= stride);
                if !is_apart {
                    return Err(Error::invalid(
                        "two spans of a pool share bytes, or alternate with different strides",
                    )
                    .with("base", span.base)
                    .with("stride", span.stride));
                }
                group = Some((stride, first, last.max(end)));
            }
            _ => group = Some((span.stride, span.base, end)),
        }
        end_of_blocks = block_end;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
