"""One vLLM that embeds a few prompts and exits: `pool.py QUESTION_JSON`, see `Question`.

The reply has an object for each prompt: the prompt's `vector`, and how many of its tokens came from
a cache (`cached`). Before each prompt vLLM's own prefix cache is emptied.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from harness import Engine, reply, set_environment


@dataclass
class Question:
    """The program's argument. `pooling`: vLLM's method of pooling. `store`: the path of the store;
    without it, the engine has no connector. With `offloads` the connector has the data path of GPU
    engines.
    """

    model: str
    pooling: str
    prompts: list[list[int]]
    store: str | None = None
    offloads: bool = False


def offload() -> None:
    """Gives connectors the data path of GPU engines, with a worker that copies CPU tensors."""
    from ritornello.vllm import data_path, offloading_path
    from servers.vllm import CPU_SPEC

    data_path.data_path = lambda: offloading_path.OffloadingPath
    offloading_path.SPEC = CPU_SPEC


def main(asked: Question) -> None:
    set_environment()
    if asked.offloads:
        offload()
    options = {} if asked.store else {"kv_transfer_config": None}
    pooler = {"seq_pooling_type": asked.pooling}
    engine = Engine(
        Path(asked.model),
        Path(asked.store or ""),
        runner="pooling",
        pooler_config=pooler,
        dtype="float32",
        **options,
    )
    said = []
    for prompt in asked.prompts:
        (output,) = engine.llm.embed([{"prompt_token_ids": prompt}], use_tqdm=False)
        said.append({"vector": output.outputs.embedding, "cached": output.num_cached_tokens})
        if asked.store:
            engine.forget()
    reply(said)
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(Question(**json.loads(sys.argv[1])))
