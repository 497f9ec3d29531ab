#!/usr/bin/env python3
"""Makes a model with fixed random weights and a byte-level tokenizer in seconds, without downloads.

    build/env/vllm/bin/python engines/vllm/make_model.py SHAPE FOLDER

`tiny` and `demo` are Llama models. `windows` is a Gemma 3, in which two layers of three attend to
the last 128 tokens only. `latent` is a DeepSeek V2 without experts (latent attention: one KV vector
for all heads). `states` is an LFM2, in which every second layer is a convolution: vLLM keeps its
state as a `MambaSpec`. `sinks` is a gpt-oss, whose attention has sinks and, in every second layer,
a window. `shallow` is a Llama of one layer, and `eagle` its EAGLE head: one layer that drafts
tokens. `mtp` is a MiMo of one layer with one MTP layer, which drafts tokens as well. The drafting
layers have the weights of their target's layer and draft from the tokens alone, so their drafts are
often accepted, if their KV is right.

The weights depend on the shape alone (fixed seed). Their standard deviation is large enough that
greedy answers depend on the whole prompt.
"""

from __future__ import annotations

import sys
from fcntl import LOCK_EX, flock
from hashlib import sha256
from pathlib import Path
from typing import Any

SHALLOW: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
}
SHAPES: dict[str, dict[str, Any]] = {
    # 2.5 M parameters, for tests.
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
    },
    # 36.5 M parameters, for the demonstration: prefilling a long prompt takes seconds on two cores.
    "demo": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "max_position_embeddings": 16384,
        "initializer_range": 0.08,
    },
    "windows": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "sliding_window": 128,
        "query_pre_attn_scalar": 64,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "latent": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "first_k_dense_replace": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
    },
    "states": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "conv_dim": 256,
        "block_dim": 256,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "sinks": {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "sliding_window": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "shallow": SHALLOW,
    "eagle": SHALLOW,
    "mtp": SHALLOW,
}
# Classes of configuration and model in transformers.
KINDS: dict[str, tuple[str, str]] = {
    "windows": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "latent": ("DeepseekV2Config", "DeepseekV2ForCausalLM"),
    "states": ("Lfm2Config", "Lfm2ForCausalLM"),
    "sinks": ("GptOssConfig", "GptOssForCausalLM"),
    "mtp": ("Qwen2Config", "Qwen2ForCausalLM"),
}
LLAMA = ("LlamaConfig", "LlamaForCausalLM")
COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
CHAT = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_tokenizer(folder: Path) -> None:
    """Makes a byte-level tokenizer; a few merges fill the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog."] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = CHAT
    fast.save_pretrained(folder)


def save_eagle(model: Any, folder: Path) -> None:
    """Saves a Llama model of one layer as the EAGLE head of this model, with the names that vLLM
    reads. The head uses the embeddings of its target model, and ignores its hidden states.
    """
    import torch
    from safetensors.torch import save_file

    config = model.config
    state = {
        name.removeprefix("model."): tensor
        for name, tensor in model.state_dict().items()
        if name.startswith("model.layers.") and "input_layernorm" not in name
    }
    # The layer of a head has no norm before its attention. In the target this norm divides an
    # embedding by about the standard deviation of the weights.
    for kind in "qkv":
        state[f"layers.0.self_attn.{kind}_proj.weight"] /= config.initializer_range
    tokens = torch.eye(config.hidden_size)
    state["fc.weight"] = torch.cat([tokens, 0 * tokens], 1).to(torch.bfloat16)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)


def save_mtp(model: Any, folder: Path) -> None:
    """Saves a Qwen 2 model of one layer as a MiMo. Its MTP layer has the weights of this layer, and
    ignores the hidden states of the target.
    """
    import torch
    from safetensors.torch import save_file

    config, width = model.config, model.config.hidden_size
    state = dict(model.state_dict())
    for name in list(state):
        if name.startswith("model.layers."):
            state[name.replace(".layers.", ".mtp_layers.")] = state[name].clone()
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        state[f"model.mtp_layers.0.{norm}.weight"] = torch.ones(width, dtype=torch.bfloat16)
    # The MTP layer normalizes the embeddings, and its target does not.
    tokens = config.initializer_range * torch.eye(width)
    state["model.mtp_layers.0.input_proj.weight"] = torch.cat([0 * tokens, tokens], 1).to(
        torch.bfloat16
    )
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config.num_nextn_predict_layers = 1
    config.architectures = ["MiMoForCausalLM"]
    config.save_pretrained(folder)


SAVES = {"eagle": save_eagle, "mtp": save_mtp}


def make_model(shape: str, folder: Path) -> int:
    """Writes model and tokenizer; returns the number of parameters."""
    # Import these modules here: their import takes long, and is not needed if the model exists.
    import torch
    import transformers

    torch.manual_seed(0)
    config, kind = (getattr(transformers, name) for name in KINDS.get(shape, LLAMA))
    model = kind(config(**(COMMON | SHAPES[shape]))).to(torch.bfloat16)
    if shape in SAVES:
        SAVES[shape](model, folder)
    else:
        model.save_pretrained(folder)
    make_tokenizer(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in SHAPES:
        print(__doc__, file=sys.stderr)
        return 2
    shape, folder = arguments[0], Path(arguments[1])
    # A change of this module may change the model, so a model that an earlier version made is made
    # again.
    digest = sha256(Path(__file__).read_bytes()).hexdigest()
    stamp = folder / ".stamp"
    folder.mkdir(parents=True, exist_ok=True)
    # Suites that run concurrently share models.
    with (folder / ".lock").open("w") as lock:
        flock(lock, LOCK_EX)
        if stamp.is_file() and stamp.read_text() == digest:
            return 0
        parameters = make_model(shape, folder)
        stamp.write_text(digest)
    print(f"{folder}: {parameters / 1e6:.1f} M parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
