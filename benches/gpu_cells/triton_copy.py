"""A Triton kernel that copies pieces between addresses."""

import triton
import triton.language as tl


@triton.jit
def copy_pieces(sources, targets, words, count, chunk: tl.constexpr):
    """Copies `count` pieces of `words` 8-byte words: piece `i` from the address `sources[i]` to the
    address `targets[i]`. Each program copies every `num_programs`-th piece, `chunk` words at a
    time.
    """
    lane = tl.arange(0, chunk)
    for piece in range(tl.program_id(0), count, tl.num_programs(0)):
        source = tl.load(sources + piece).to(tl.pointer_type(tl.int64))
        target = tl.load(targets + piece).to(tl.pointer_type(tl.int64))
        for first in range(0, words, chunk):
            at = first + lane
            inside = at < words
            tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)
