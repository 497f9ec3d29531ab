"""vLLM in this process, and prompts for it."""

import json
import os
from pathlib import Path
from typing import Any

from servers.vllm import connector

REPLY = "reply: "
BLOCK = 32
# Blocks of vLLM's cache: fewer than the requests of the tests of preemption need together, so that
# vLLM preempts a request.
BLOCKS = 40


class Engine:
    def __init__(self, model: Path, store_path: Path, **changes: Any) -> None:
        from vllm import LLM

        options: dict[str, Any] = {
            "enforce_eager": True,
            "block_size": BLOCK,
            "max_model_len": 1024,
            "num_gpu_blocks_override": BLOCKS,
            "disable_log_stats": False,
            "kv_transfer_config": connector(path=str(store_path), capacity="1GiB"),
        }
        self.llm = LLM(str(model), **(options | changes))

    @property
    def scheduler(self) -> Any:
        """The scheduler of vLLM, which must run in this process."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def ask(
        self, *prompts: list[int], answer: int = 24, params: dict[str, Any] | None = None
    ) -> list[Any]:
        """Returns vLLM's outputs for all prompts, decoded greedily; each has a field
        `num_cached_tokens`.
        """
        from vllm import SamplingParams

        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(
            max_tokens=answer, temperature=0, ignore_eos=True, extra_args=extra
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return list(self.llm.generate(asked, sampling, use_tqdm=False))

    def tokens(self, *prompts: list[int], answer: int = 24) -> list[list[int]]:
        return [list(o.outputs[0].token_ids) for o in self.ask(*prompts, answer=answer)]

    def forget(self) -> None:
        """Waits until the store has all pages, because a lookup does not see puts in progress. Then
        empties vLLM's own prefix cache.
        """

        # A nested function is pickled by value, so workers in other processes can run it.
        def wait_for_saves(_worker: object) -> None:
            from time import sleep

            from vllm.distributed.kv_transfer import get_kv_transfer_group

            # Only the data path of Ritornello's connector has a `_worker`; `MultiConnector` holds
            # several connectors.
            group = get_kv_transfer_group()
            sides = [
                getattr(getattr(one, "data_path", None), "_worker", None)
                for one in getattr(group, "_connectors", [group])
            ]
            side = next(filter(None, sides), None)
            while side and not all(
                side._store.is_done(ticket)
                for pending in side._pending_saves
                for ticket in pending.tickets
            ):
                sleep(0.001)
            if side and side._store._settings.tiers and side._store._store:
                # With the setting `tiers`, also wait until the lower tiers have the pages.
                side._store._store.flush()

        self.llm.collective_rpc(wait_for_saves, timeout=60)
        assert self.llm.reset_prefix_cache()

    def count(self, name: str, **labels: str) -> float:
        """Returns a counter of vLLM's metrics, summed over the labels that are not given. vLLM
        reports the connector's counts with a later engine step: ask for a short answer before
        reading the last counts.
        """
        return sum(
            metric.value
            for metric in self.llm.get_metrics()
            if metric.name == name and labels.items() <= metric.labels.items()
        )

    def tokens_from(self, source: str) -> float:
        return self.count("vllm:prompt_tokens_cached_by_source", source=source)

    def external_tokens(self) -> float:
        return sum(map(self.tokens_from, ("host", "disk", "external_unspecified")))


def prompt(seed: int, length: int = 300) -> list[int]:
    """Returns token ids; prompts of different seeds below 290 differ in the first id."""
    return [3 + (seed * 31 + place * (7 + seed)) % 290 for place in range(length)]


def set_environment(**changes: str) -> None:
    """Sets vLLM up for CPUs, with its engine in this process; must precede the import of vLLM."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
    )
    os.environ.update(changes)


def reply(found: Any) -> None:
    """Replies to the test that runs this program."""
    print(REPLY + json.dumps(found), flush=True)
