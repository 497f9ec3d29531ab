"""One vLLM with two connectors inside MultiConnector: `ask_composed.py QUESTION_JSON`.

The reply holds, for each named request, the tokens of the answer (`said`) and the number of prompt
tokens that came from a connector (`hits`). It also holds, for each load of the connector `lender`,
the number of blocks that it was asked to fill (`lent`), and the count of Ritornello's `errors`.
"""

import json
import sys
from pathlib import Path
from typing import Any

from harness import Engine, prompt, reply, set_environment

from servers.vllm import connector

LENGTH = 300
NO_STORE = {"ritornello.no_store": True}


def composed(store: str, order: list[str]) -> dict[str, Any]:
    """Returns vLLM's `kv_transfer_config` for a MultiConnector with the connectors `order`. As in
    users' configurations, `kv_load_failure_policy` is not set.
    """
    children = {
        "ritornello": connector(path=store, capacity="1GiB"),
        "lender": {
            "kv_connector": "LenderConnector",
            "kv_connector_module_path": "lender",
            "kv_role": "kv_both",
        },
        "nixl": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [children[name] for name in order]},
    }


class Conversation:
    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.said: dict[str, list[int]] = {}
        self.hits: dict[str, float] = {}

    def ask(self, name: str, prompt: list[int], answer: int = 24, **params: Any) -> None:
        before = self.engine.external_tokens()
        output = self.engine.ask(prompt, answer=answer, params=params)[0]
        self.said[name] = list(output.outputs[0].token_ids)
        self.hits[name] = self.engine.external_tokens() - before

    def forget(self) -> None:
        # With the engine's core in this process, vLLM runs steps only while it has requests. The
        # steps of this short prompt begin the last request's saves.
        self.engine.ask([5, 6, 7], answer=4)
        self.engine.forget()


def talk(engine: Any) -> Conversation:
    import pytest
    from lender import MODE
    from probes import fail_loads

    talk = Conversation(engine)
    broken, lent, once = (prompt(seed, LENGTH) for seed in (61, 62, 63))
    # The connector of `lender` remembers these prompts. The store does not store them.
    MODE.remembers = True
    for name, asked in (("broken", broken), ("lent", lent), ("once", once)):
        talk.ask(f"{name} computed", asked, **NO_STORE)
        talk.forget()
    MODE.remembers, MODE.lends = False, True
    MODE.fails = 2
    talk.ask("broken repaired", broken)
    talk.forget()
    MODE.fails = None
    talk.ask("lent", lent)
    talk.forget()
    # The request ends in the same step that loads its blocks.
    talk.ask("once", once, answer=1)
    talk.forget()
    MODE.lends = False
    for name, asked in (("broken", broken), ("lent", lent), ("once", once)):
        talk.ask(f"{name} stored", asked)
        talk.forget()
    with pytest.MonkeyPatch.context() as patch:
        fail_loads(patch, [1])
        talk.ask("lent with a failure", lent)
    return talk


def main(store: str, model: str, order: list[str]) -> None:
    set_environment(VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    engine = Engine(Path(model), Path(store), kv_transfer_config=composed(store, order))
    talked = talk(engine)
    from lender import LENT

    found = {"said": talked.said, "hits": talked.hits, "lent": LENT}
    found["errors"] = engine.count("vllm:ritornello_errors")
    reply(found)
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
