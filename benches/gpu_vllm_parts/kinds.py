"""The engines of `benches/gpu_vllm.py`, and their settings."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 16
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "transformers_version": "5.17.0",
}
TINY = {
    **LLAMA_8B,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 320,
}
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
    },
}


@dataclass(frozen=True)
class Kind:
    """A kind of engine. `store`: the name of its store, "" for none; `restarted`: the store is not
    emptied, but kept from an earlier engine; `own_answers`: answers are compared with earlier
    answers of the same engine; `own_copies`: Ritornello copies between GPU and store; `together`:
    the prompts are sent together, and KV memory has room for three of them; `arguments`: further
    arguments of `LLM`.
    """

    connector: str = "RitornelloConnector"
    store: str = ""
    restarted: bool = False
    own_answers: bool = False
    own_copies: bool = False
    together: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


# The engines in the order in which they run, the most informative first, because the time budget
# may not suffice for all engines.
KINDS = {
    "none": Kind(connector="", own_answers=True),
    "own": Kind(store="own", own_copies=True),
    "own-restarted": Kind(store="own", own_copies=True, restarted=True),
    "tier": Kind(store="tier"),
    "tier-restarted": Kind(store="tier", restarted=True),
    "own-graphs": Kind(store="own", own_copies=True, own_answers=True, arguments=GRAPHS),
    "offloading": Kind(connector="OffloadingConnector"),
    "own-memory": Kind(store="memory", own_copies=True),
    "own-memory-restarted": Kind(store="memory", own_copies=True, restarted=True),
    "own-together": Kind(store="memory", own_copies=True, restarted=True, together=True),
}
TOGETHER_PASSES = 5


@dataclass
class Bench:
    """The model, the prompts, and the folders of the engines' files. `config`: the model's
    `config.json`. `prompts`: the name and the number of tokens of each prompt. `out`: the folder of
    the report and the logs. `folder`: a folder on the disk to measure. `weights`: the folder of the
    model. `memory`: a folder in /dev/shm. `deadline`: the `time.monotonic` at which the time
    budget ends.
    """

    config: dict[str, Any]
    prompts: list[tuple[str, int]]
    out: Path
    folder: Path
    weights: Path
    memory: Path
    deadline: float

    @property
    def longest(self) -> int:
        return max(tokens for _, tokens in self.prompts)

    @property
    def block_bytes(self) -> int:
        config = self.config
        width = config["num_key_value_heads"] * config["head_dim"]
        # K and V, each with 2 bytes per number.
        return int(config["num_hidden_layers"] * width * BLOCK * 2 * 2)

    def store(self, kind: Kind) -> Path:
        return (self.memory if kind.store == "memory" else self.folder) / f"store-{kind.store}"

    def spec(self, name: str) -> dict[str, Any]:
        """Returns the description of the engine `name` that `engine.py` reads."""
        kind = KINDS[name]
        warm = min(8193, self.longest)
        blocks = self.longest * 3 // 2 // BLOCK + 16
        passes = ["restarted" if kind.restarted else "cold", "second"]
        if kind.together:
            # Room for three of the longest prompts, two more blocks, and the block of vLLM that
            # holds no KV. Three answers need more than two blocks, so vLLM preempts a request.
            blocks = 3 * -(-self.longest // BLOCK) + 2 + 1
            passes = ["together"] * TOGETHER_PASSES
        arguments = {
            "model": str(self.weights),
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "block_size": BLOCK,
            "enforce_eager": True,
            "disable_log_stats": False,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 8192,
            "seed": 0,
            # Without these settings vLLM would, at start, compile kernels that this model does not
            # use.
            "kernel_config": {
                "enable_jit_warmup": False,
                "enable_cutedsl_warmup": False,
                "enable_flashinfer_autotune": False,
            },
            "max_model_len": self.longest + 256,
            "num_gpu_blocks_override": blocks,
            "gpu_memory_utilization": 0.5,
            # With this setting, vLLM does not derive the size of KV memory from free memory.
            "kv_cache_memory_bytes": max(1 << 30, (blocks + 48) * self.block_bytes),
            **kind.arguments,
        }
        if kind.connector:
            blocks = (sum(tokens for _, tokens in self.prompts) + 2 * warm) // BLOCK
            arguments["kv_transfer_config"] = self._transfer(kind, blocks * self.block_bytes)
        return {
            "llm": arguments,
            "prompts": self.prompts,
            "passes": passes,
            "repeat": kind.own_answers,
            "stores": bool(kind.connector) and not kind.restarted,
            "warm": warm,
            "vocabulary": self.config["vocab_size"] - 20,
            "events": str(self.folder / f"{name}.events"),
            "go": str(self.folder / f"{name}.go"),
        }

    def _transfer(self, kind: Kind, stored: int) -> dict[str, Any]:
        """Returns the connector's configuration. `stored`: KV bytes of all prompts and warm-ups."""
        store, host = self.store(kind), max(stored * 5 // 4, 64 << 20)
        capacity = f"{max(stored * 5 // 2, 1 << 30) >> 20}MiB"
        extra: dict[str, Any]
        if not kind.store:
            extra = {"cpu_bytes_to_use": host, "offload_prompt_only": False}
        elif kind.own_copies:
            extra = {"path": str(store), "capacity": capacity}
        else:
            extra = {
                "tiers": [f"host {host >> 20}MiB", f"disk {store} {capacity}"],
                "gate": "always",
            }
        transfer = {
            "kv_connector": kind.connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        if kind.store:
            transfer["kv_connector_module_path"] = "ritornello.vllm"
        return transfer
