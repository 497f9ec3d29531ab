#!/usr/bin/env python3
"""Writes queries, keys and values of a real forward pass, for `ritornello bench codec --kv`.

    build/env/vllm/bin/python engines/vllm/make_kv.py {tiny,demo} FILE.safetensors
        [--steps 300] [--batch 8] [--tokens 512] [--keep 512] [--queries 64] [--layers 0,3]

Trains the model of `make_model.py` on this repository's prose and Python for some steps, from a
fixed seed. Then runs the model over two texts that it has not seen: Python, a language of the
training (the set `trained`), and Rust (the set `other`). Tensors are named `SET.N.q`, `SET.N.k` and
`SET.N.v` for layer N. They are bfloat16, tokens x heads x numbers per head, as an engine caches
them (after rotary embedding). Queries cover the last `--queries` tokens of the model's input, keys
and values the last `--keep` tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from make_model import COMMON, SHAPES
from safetensors.torch import save_file
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
WINDOW = 256

Recorded = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def text(*patterns: str) -> torch.Tensor:
    """Returns one token for each byte of the files: the byte plus 3, because the model's tokens 0
    to 2 are special.
    """
    files = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    data = b"\n".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long() + 3


def train(model: LlamaForCausalLM, tokens: torch.Tensor, steps: int, batch: int) -> float:
    """Trains on random windows of `tokens`. Returns the last step's loss, in nats per token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=max(2, steps))
    loss, started = torch.tensor(float("nan")), time.monotonic()
    for step in range(steps):
        starts = torch.randint(0, len(tokens) - WINDOW, (batch,))
        windows = torch.stack([tokens[at : at + WINDOW] for at in starts.tolist()])
        loss = model(input_ids=windows, labels=windows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 25 == 0:
            took = time.monotonic() - started
            print(f"step {step}: {loss.item():.3f} nats, {took:.0f} s", file=sys.stderr)
    return float(loss.item())


def record(model: LlamaForCausalLM, tokens: torch.Tensor) -> Recorded:
    """Returns queries, keys and values of every layer, as its attention receives them."""
    recorded: Recorded = []
    eager = torch.nn.functional.scaled_dot_product_attention

    def attention(
        _module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        recorded.append((query[0], key[0], value[0]))
        out = eager(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("recording", attention)
    model.set_attn_implementation("recording")
    with torch.no_grad():
        model(input_ids=tokens[None], use_cache=False)
    return recorded


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: 300)")
    parser.add_argument(
        "--batch", type=int, default=8, help=f"windows of {WINDOW} tokens per step (default: 8)"
    )
    parser.add_argument(
        "--tokens", type=int, default=512, help="tokens of the model's input (default: 512)"
    )
    parser.add_argument(
        "--keep",
        type=int,
        default=512,
        help="last tokens of the input whose keys and values are written (default: 512)",
    )
    parser.add_argument(
        "--queries",
        type=int,
        default=64,
        help="last tokens of the input whose queries are written (default: 64)",
    )
    parser.add_argument(
        "--layers", default="", help="numbers of the layers to write (default: all)"
    )
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**COMMON, **SHAPES[arguments.shape]))
    loss = train(
        model, text("docs/**/*.md", "*.md", "python/**/*.py"), arguments.steps, arguments.batch
    )
    model = model.to(torch.bfloat16).eval()
    chosen = [int(layer) for layer in arguments.layers.split(",") if layer]
    tensors: dict[str, torch.Tensor] = {}
    unseen = {"trained": text("demo/**/*.py", "tests/**/*.py"), "other": text("crates/**/*.rs")}
    for name, tokens in unseen.items():
        for layer, parts in enumerate(record(model, tokens[: arguments.tokens])):
            if chosen and layer not in chosen:
                continue
            for part, tensor in zip("qkv", parts, strict=True):
                last = arguments.queries if part == "q" else arguments.keep
                by_token = tensor.transpose(0, 1)[-last:].to(torch.bfloat16)
                tensors[f"{name}.{layer}.{part}"] = by_token.contiguous()
    about = {
        "model": arguments.shape,
        "steps": str(arguments.steps),
        "loss": f"{loss:.3f}",
        "torch": torch.__version__,
    }
    save_file(tensors, arguments.file, metadata=about)
    print(f"{arguments.file}: {len(tensors)} tensors, {about}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
