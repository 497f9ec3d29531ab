"""A decoder in plain PyTorch, with random weights. It computes a prompt in chunks; attention reads
keys and values from paged memory, as in engines.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

# Tokens of a page.
BLOCK = 16


@dataclass(frozen=True)
class Dims:
    """The sizes of a model and its prompt. `inner`: width of the feed-forward layers. `head`:
    numbers in a key of one head. `prompt`: tokens of the prompt. `chunk`: tokens that one pass
    computes.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    prompt: int
    chunk: int


LLAMA_8B = Dims(32, 4096, 14_336, 32, 8, 128, 32_000, 32_768, 8192)
SMALL = Dims(2, 64, 128, 4, 2, 16, 256, 512, 128)


class Model:
    """A decoder with paged keys and values: `[blocks, 2, BLOCK, kv_heads, head]` for each layer."""

    def __init__(self, dims: Dims, device: torch.device) -> None:
        self.dims = dims
        generator = torch.Generator(device).manual_seed(1)

        def weight(rows: int, columns: int) -> torch.Tensor:
            values = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
            return values.normal_(0, columns**-0.5, generator=generator)

        d = dims
        self.embedding = weight(d.vocabulary, d.hidden)
        self.head = weight(d.vocabulary, d.hidden)
        self.qkv = [weight((d.heads + 2 * d.kv_heads) * d.head, d.hidden) for _ in range(d.layers)]
        self.out = [weight(d.hidden, d.heads * d.head) for _ in range(d.layers)]
        self.up = [weight(2 * d.inner, d.hidden) for _ in range(d.layers)]
        self.down = [weight(d.hidden, d.inner) for _ in range(d.layers)]
        shape = (d.prompt // BLOCK, 2, BLOCK, d.kv_heads, d.head)
        self.kv = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(d.layers)]
        frequency = 500_000.0 ** (-torch.arange(0, d.head, 2, device=device) / d.head)
        angles = torch.arange(d.prompt, device=device)[:, None] * frequency
        self.cos, self.sin = angles.cos()[:, None], angles.sin()[:, None]

    def _rotate(self, x: torch.Tensor, first: int) -> torch.Tensor:
        rows = slice(first, first + len(x))
        cos, sin = self.cos[rows], self.sin[rows]
        left, right = x.float().chunk(2, dim=-1)
        turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
        return turned.to(x.dtype)

    def prefill(self, tokens: torch.Tensor, blocks: torch.Tensor, cached: int) -> torch.Tensor:
        """Computes all tokens after the leading `cached` tokens; page `n` of the prompt is block
        `blocks[n]`. Returns the logits of the last token.
        """
        last = torch.empty(0)
        with torch.inference_mode():
            for first in range(cached, len(tokens), self.dims.chunk):
                chunk = tokens[first : first + self.dims.chunk]
                last = self._chunk(chunk, blocks, first)
            return functional.linear(_norm(last), self.head).float()

    def _chunk(self, tokens: torch.Tensor, blocks: torch.Tensor, first: int) -> torch.Tensor:
        d, count, end = self.dims, len(tokens), first + len(tokens)
        own, known = blocks[first // BLOCK : end // BLOCK], blocks[: end // BLOCK]
        x = self.embedding[tokens]
        for layer in range(d.layers):
            qkv = functional.linear(_norm(x), self.qkv[layer]).view(count, -1, d.head)
            q, k, v = qkv.split((d.heads, d.kv_heads, d.kv_heads), dim=1)
            q, k = self._rotate(q, first), self._rotate(k, first)
            pages = torch.stack((k, v)).view(2, -1, BLOCK, d.kv_heads, d.head).transpose(0, 1)
            self.kv[layer].index_copy_(0, own, pages.contiguous())
            keys, values = (
                self.kv[layer][known, side].view(1, end, d.kv_heads, d.head).transpose(1, 2)
                for side in range(2)
            )
            attended = functional.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                keys,
                values,
                attn_mask=causal_lower_right(count, end),
                enable_gqa=True,
            )
            x = x + functional.linear(
                attended[0].transpose(0, 1).reshape(count, -1), self.out[layer]
            )
            gate, up = functional.linear(_norm(x), self.up[layer]).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, self.down[layer])
        return x[-1]


def _norm(x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:])
