"""vLLM with its own offloading and our tier below it. As a program this module runs one engine in a
separate process, controlled line by line.
"""

import json
import sys
from pathlib import Path
from typing import Any

from harness import BLOCK, BLOCKS, Engine, prompt, reply

from servers.vllm import CPU_SPEC

# Capacity of vLLM's host tier in chunks: enough for the longest prompt, but not for two prompts of
# 300 tokens.
HOST_CHUNKS = 16
PREFIX = "vllm:kv_offload_"
# The seed of a prompt that no test uses.
FILLER = 251


class TierEngine(Engine):
    """`tiers` is vLLM's list of secondary tiers; `host_chunks` is the capacity of vLLM's host tier
    in chunks.
    """

    def __init__(
        self,
        model: Path,
        tiers: list[dict[str, Any]],
        *,
        host_chunks: int = HOST_CHUNKS,
        blocks_per_chunk: int = 1,
        **options: Any,
    ) -> None:
        from vllm import LLM

        self.llm = LLM(
            str(model),
            enforce_eager=True,
            block_size=BLOCK,
            max_model_len=1024,
            num_gpu_blocks_override=BLOCKS,
            disable_log_stats=False,
            kv_transfer_config={
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    **CPU_SPEC,
                    "cpu_bytes_to_use": host_chunks * blocks_per_chunk * block_bytes(model),
                    "blocks_per_chunk": blocks_per_chunk,
                    "secondary_tiers": tiers,
                },
            },
            **options,
        )

    @property
    def manager(self) -> Any:
        """Tiering manager of vLLM."""
        core = self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        return core.scheduler.connector.connector_scheduler.manager

    @property
    def tier(self) -> Any:
        """The `ritornello.vllm.tier.tier.Tier` to which our secondary tier passes calls of vLLM."""
        (manager,) = self.manager.secondary_tiers
        return manager._tier

    def forget_all(self) -> None:
        """Empties vLLM's prefix cache, and fills its host tier with the chunks of the filler, a
        prompt that no test uses; the store keeps everything. vLLM pins a chunk of the host tier
        while the tier below stores it. This method therefore waits for the end of puts twice:
        before the filler, so that its chunks find room, and after it, so that later prompts can
        replace its chunks.
        """
        self.forget()
        self._unpin()
        self.ask(prompt(FILLER, HOST_CHUNKS * BLOCK), answer=1)
        self._unpin()
        self.forget()

    def _unpin(self) -> None:
        """Waits until the tier below has stored all chunks, and vLLM has unpinned them. Sends short
        prompts, because vLLM needs steps for both: it offloads a chunk one step after the step that
        computed the chunk, and unpins the chunk in a later step.
        """
        self.ask([1, 2, 3], answer=2)
        if self.tier is not None:
            self.tier._jobs.wait(60)
        self.ask([1, 2, 3], answer=2)

    def answer(self, asked: list[int]) -> dict[str, Any]:
        """Returns the answer to a prompt (`tokens`), and the number of the prompt's tokens that
        were not computed (`cached`).
        """
        (output,) = self.ask(asked)
        return {
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
        }

    def offloaded(self) -> dict[str, float]:
        """Returns vLLM's counts of offloading, with the tier's counts. First asks for a short
        answer, because vLLM reports counts with a later engine step.
        """
        self.ask([1, 2, 3], answer=4)
        found: dict[str, float] = {"disk": self.external_tokens()}
        for metric in self.llm.get_metrics():
            if metric.name.startswith(PREFIX) and hasattr(metric, "value"):
                name = metric.name.removeprefix(PREFIX)
                found[name] = found.get(name, 0) + metric.value
        return found

    def stop(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def block_bytes(model: Path) -> int:
    """Returns the bytes of one block, all layers: the tests' model is a Llama in bfloat16."""
    config = json.loads((model / "config.json").read_text())
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(BLOCK * 2 * 2 * heads * width * config["num_hidden_layers"])


def ritornello_tier(path: Path, **settings: Any) -> dict[str, Any]:
    tier = {"type": "RitornelloTier", "module_path": "ritornello.vllm", "path": str(path)}
    return tier | settings


def obey(engine: TierEngine, order: dict[str, Any]) -> Any:
    match order["do"]:
        case "ask":
            return engine.answer(order["prompt"])
        case "forget":
            engine.forget_all()
        case "counts":
            # A store that is a cache over several tiers (`TierCache`) adds its counters to the
            # counters of our tier at intervals: end the current interval.
            engine.tier._store._reported_at = 0.0
            engine.offloaded()
            return engine.offloaded()
        case "flush":
            # A lookup does not see puts in progress.
            engine._unpin()
            engine.tier._store._store.flush()
        case "stop":
            engine.stop()
    return None


def obey_all(engine: TierEngine) -> None:
    """Carries out orders, one per line of input, until the order to stop."""
    for line in sys.stdin:
        order = json.loads(line)
        reply(obey(engine, order))
        if order["do"] == "stop":
            break


def main() -> None:
    asked = json.loads(sys.argv[1])
    obey_all(TierEngine(Path(asked["model"]), asked["tiers"], **asked.get("options", {})))


if __name__ == "__main__":
    main()
