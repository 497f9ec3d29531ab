"""A Triton kernel that copies pieces between addresses."""

import triton
import triton.language as tl


@triton.jit
def copy_pieces(sources, targets, words, count, chunk: tl.constexpr):
    """Each program copies every `num_programs`-th piece of `words` 8-byte words."""
    lane = tl.arange(0, chunk)
    for piece in range(tl.program_id(0), count, tl.num_programs(0)):
        source = tl.load(sources + piece).to(tl.pointer_type(tl.int64))
        target = tl.load(targets + piece).to(tl.pointer_type(tl.int64))
        for first in range(0, words, chunk):
            at = first + lane
            inside = at < words
            tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)
