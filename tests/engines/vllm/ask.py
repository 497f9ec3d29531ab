"""One vLLM that answers a few prompts and exits: `ask.py QUESTION_JSON`, see `Question`.

For each prompt the reply holds the tokens of two or more answers:

    first                     the first answer in this vLLM
    stored                    the prompt's pages were loaded from the store
    broken 0, broken 1, ...   the load failed in pages `bad[0]`, `bad[1]`, ...
    stale                     with `spoils_drafts`: after the load, the blocks of the draft model
                              were filled with noise

For each answer the reply also holds how many tokens of the prompt came from the store
(`first_hits`, ...), how many draft tokens were accepted (`first_accepted`, ...), and how many pages
failed to load (`first_failed`, ...). Besides, the reply holds the connector's `counts`, and the
`draft_layers`: the names of the draft model's attention layers.
"""

import json
import multiprocessing
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import Engine, prompt, reply, set_environment

LENGTH = 300
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
FAILED = "vllm:ritornello_failed_pages"
COUNTED = (
    "errors",
    "failed_pages",
    "loaded_pages",
    "saved_pages",
    "saved_bytes",
    "layer_loads",
    "step_loads",
    "apart_loads",
)


@dataclass
class Question:
    """The program's argument. `seeds`: the seeds of the prompts. `options`: vLLM's options. `bad`:
    for each of the answers `broken 0`, ..., the indices of the pages that fail in every load. With
    `processes` the engine's core runs in a separate process, where `bad` and `spoils_drafts` have
    no effect. With `forks_workers` vLLM forks its workers, which then have the hash seed of this
    process, and the methods of vLLM that Ritornello has wrapped in this process; tests of workers
    that vLLM spawns are in `test_tiers` and `test_weights`.
    """

    model: str
    store: str
    seeds: list[int]
    options: dict[str, Any] = field(default_factory=dict)
    bad: list[list[int]] = field(default_factory=list)
    spoils_drafts: bool = False
    processes: bool = False
    forks_workers: bool = False


def fork_workers() -> None:
    """Makes vLLM fork its workers, because by default it spawns the workers on CPUs, and each then
    imports vLLM again.
    """
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def make_room_between_stages(worker: Any) -> None:
    """Allocates a worker's buffers for the output of the previous pipeline stage. vLLM 0.32 makes
    them during a warm-up, which it omits on CPUs without compilation.
    """
    runner = worker.model_runner
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def draft_layers(worker: Any) -> list[str]:
    """Returns the names of the attention layers of the draft model."""
    drafter = getattr(worker.model_runner, "drafter", None)
    return sorted(getattr(drafter, "_draft_attn_layer_names", ()))


def answer(engine: Any, seed: int, asked: Question, drafts: list[str]) -> dict[str, Any]:
    import pytest
    from probes import fail_loads, spoil_drafts

    broken = {f"broken {number}": pages for number, pages in enumerate(asked.bad)}
    said: dict[str, Any] = {}
    for name in ("first", "stored", *broken, *["stale"] * asked.spoils_drafts):
        before, accepted = engine.external_tokens(), engine.count(ACCEPTED)
        failed = engine.count(FAILED)
        with pytest.MonkeyPatch.context() as patch:
            if name in broken:
                fail_loads(patch, broken[name])
            if name == "stale":
                spoil_drafts(patch, drafts)
            output = engine.ask(prompt(seed, LENGTH))[0]
        said[name] = list(output.outputs[0].token_ids)
        said[f"{name}_hits"] = engine.external_tokens() - before
        said[f"{name}_accepted"] = engine.count(ACCEPTED) - accepted
        said[f"{name}_failed"] = engine.count(FAILED) - failed
        engine.forget()
    return said


def main(asked: Question) -> None:
    set_environment(
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",
        VLLM_ENABLE_V1_MULTIPROCESSING=str(int(asked.processes)),
    )
    if asked.forks_workers:
        fork_workers()
    engine = Engine(Path(asked.model), Path(asked.store), **asked.options)
    engine.llm.collective_rpc(make_room_between_stages)
    drafts = engine.llm.collective_rpc(draft_layers)[-1]
    answers = [answer(engine, seed, asked, drafts) for seed in asked.seeds]
    counts = {name: engine.count(f"vllm:ritornello_{name}") for name in COUNTED}
    for source in ("host", "disk", "external_unspecified"):
        counts[source] = engine.tokens_from(source)
    reply({"answers": answers, "counts": counts, "draft_layers": drafts})
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(Question(**json.loads(sys.argv[1])))
