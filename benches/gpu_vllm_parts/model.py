"""Writes a Llama model of random weights.

    python3 -P model.py FOLDER CONFIG

`CONFIG` is the content of the model's `config.json`. Keys and queries are so large that attention
is sharp: an answer depends on single tokens everywhere in the prompt.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LAYERS_PER_FILE = 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Tensors = dict[str, torch.Tensor]


def random(generator: torch.Generator, rows: int, columns: int, deviation: float) -> torch.Tensor:
    empty = torch.empty(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    return empty.normal_(0, deviation, generator=generator).cpu()


def parts(config: dict[str, Any]) -> Iterator[Tensors]:
    """Yields the tensors of each file."""
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    deviation = hidden**-0.5
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    # `ones` is cloned, because safetensors refuses tensors of one file that share memory.
    for first in range(0, config["num_hidden_layers"], LAYERS_PER_FILE):
        tensors: Tensors = {}
        for layer in range(first, min(first + LAYERS_PER_FILE, config["num_hidden_layers"])):
            at = f"model.layers.{layer}."
            tensors |= {
                at + "self_attn.q_proj.weight": random(generator, queries, hidden, 2.5 * deviation),
                at + "self_attn.k_proj.weight": random(generator, keys, hidden, 2.5 * deviation),
                at + "self_attn.v_proj.weight": random(generator, keys, hidden, deviation),
                at + "self_attn.o_proj.weight": random(generator, hidden, queries, queries**-0.5),
                at + "mlp.gate_proj.weight": random(generator, mlp, hidden, deviation),
                at + "mlp.up_proj.weight": random(generator, mlp, hidden, deviation),
                at + "mlp.down_proj.weight": random(generator, hidden, mlp, mlp**-0.5),
                at + "input_layernorm.weight": ones.clone(),
                at + "post_attention_layernorm.weight": ones.clone(),
            }
        yield tensors
    yield {
        "model.embed_tokens.weight": random(generator, config["vocab_size"], hidden, 1.0),
        "model.norm.weight": ones,
        "lm_head.weight": random(generator, config["vocab_size"], hidden, deviation),
    }


def main(folder: Path, config: dict[str, Any]) -> None:
    files: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(parts(config)):
        name = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        files |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    folder.joinpath("model.safetensors.index.json").write_text(json.dumps(index))
    folder.joinpath("config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
