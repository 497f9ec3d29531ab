"""One vLLM with `RitornelloConnector` and the data path of GPU engines. `OffloadingPath` builds
vLLM's offloading as on a GPU, except that its worker copies between CPU tensors and host memory
(`servers.cpu_offloading`).

The program reads a question, one line of JSON: the `model`, the connector's settings (`extra`), the
store's `path` and the `prompts`; it may have `options` of vLLM. If a regular file is at the store's
path, the engine answers the first prompt (`unopened`) before it removes the file. For each prompt
the reply has two answers: before vLLM's own caches are emptied (`first`), and after (`again`); with
`once` only the first. Each has the tokens of the answer (`tokens`), and the number of prompt tokens
that were not computed (`cached`), of prompt tokens that came from the disk (`disk`), and of
accepted draft tokens (`accepted`). If `extra` is null, the engine has no connector. If the question
has `changes_weights`, the engine changes its weights at the end, and answers the last prompt again:
after vLLM's prefix cache is emptied (`changed`), after the connector is reset too (`reset`), and
after all caches of vLLM are emptied (`again`). If the question has no `prompts`, the engine obeys
the orders of `tier_harness` that follow, one per line.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "vllm"), str(HERE.parents[2])]

from harness import BLOCK, BLOCKS, prompt, reply, set_environment  # noqa: E402
from tier_harness import FILLER, TierEngine, obey_all  # noqa: E402
from tier_probes import rows_of  # noqa: E402
from weights import flip  # noqa: E402

from servers.vllm import CPU_SPEC, connector  # noqa: E402

# Tokens of a chunk with the tests' model: the maximum that the connector chooses, because a token
# of this model has few bytes.
CHUNK = 256
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


class ConnectorEngine(TierEngine):
    def __init__(self, model: str, extra: dict[str, Any] | None, options: dict[str, Any]) -> None:
        from vllm import LLM

        from ritornello.vllm import data_path, offloading_path

        data_path.data_path = lambda: offloading_path.OffloadingPath
        offloading_path.SPEC = CPU_SPEC
        sizes = {"block_size": BLOCK, "max_model_len": 1200, "num_gpu_blocks_override": BLOCKS}
        self.llm = LLM(
            model,
            enforce_eager=True,
            disable_log_stats=False,
            kv_transfer_config=None if extra is None else connector(**extra),
            **(sizes | options),
        )

    @property
    def manager(self) -> Any:
        return self.scheduler.connector.data_path.connector_scheduler.manager

    def forget_all(self) -> None:
        self.forget()
        self._unpin()
        self.ask(prompt(FILLER, len(rows_of(self)) * CHUNK + 1), answer=1)
        self._unpin()
        self.forget()

    def answer(self, asked: list[int]) -> dict[str, Any]:
        before, accepted = self.tokens_from("disk"), self.count(ACCEPTED)
        (output,) = self.ask(asked)
        self.ask([1, 2, 3], answer=4)  # vLLM adds to its counters in a later step
        return {
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
            "disk": self.tokens_from("disk") - before,
            "accepted": self.count(ACCEPTED) - accepted,
        }


def remove_obstacle(engine: ConnectorEngine, path: Path) -> None:
    path.unlink()
    end = monotonic() + 60
    while not engine.tier._store.open():
        assert monotonic() < end, engine.tier._store.broken
        sleep(0.05)


def answers(engine: ConnectorEngine, question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if question.get("once"):
        yield from ({"first": engine.answer(asked)} for asked in question["prompts"])
        if question["extra"] is not None:
            engine._unpin()
        return
    path = Path(question["path"])
    if path.is_file():
        yield {"unopened": engine.answer(question["prompts"][0])}
        remove_obstacle(engine, path)
        engine.forget_all()
    for asked in question["prompts"]:
        first = engine.answer(asked)
        engine.forget_all()
        yield {"first": first, "again": engine.answer(asked)}
    if question.get("changes_weights"):
        asked = question["prompts"][-1]
        engine.llm.collective_rpc(flip)
        # Empties only vLLM's prefix cache: the host memory of vLLM's offloading keeps the chunks of
        # earlier weights.
        assert engine.llm.reset_prefix_cache()
        changed = engine.answer(asked)
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        reset = engine.answer(asked)
        engine.forget_all()
        yield {"changed": changed, "reset": reset, "again": engine.answer(asked)}


def main() -> None:
    set_environment()
    question = json.loads(sys.stdin.readline())
    engine = ConnectorEngine(question["model"], question["extra"], question.get("options", {}))
    if "prompts" not in question:
        obey_all(engine)
        return
    found: dict[str, Any] = {"answers": list(answers(engine, question))}
    found["kinds"] = [
        type(group.kv_cache_spec).__name__
        for group in engine.scheduler.kv_cache_config.kv_cache_groups
    ]
    if question["extra"] is not None:
        counted = engine.offloaded()
        found["counters"] = sorted(name for name in counted if name.startswith("tiering_"))
        path = engine.scheduler.connector.data_path
        extra = path._kv_transfer_config.kv_connector_extra_config
        found["blocks_per_chunk"] = extra["blocks_per_chunk"]
    engine.stop()
    reply(found)


if __name__ == "__main__":
    main()
