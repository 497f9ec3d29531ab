"""Real SGLang servers in succession on one store: their answers equal answers of the first server,
also under injected faults.
"""

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from servers.child import owner_of
from servers.environment import shared_model
from servers.sglang import PAGE, SGLangServer, Told, storage, wait_until_stored

pytestmark = pytest.mark.long

LENGTH, ANSWER = 300, 24
# Tokens of a prompt that SGLang can take from a cache: the full pages before the last token.
CLAIMED = (LENGTH - 1) // PAGE * PAGE

Start = Callable[..., SGLangServer]


def prompt(seed: int, length: int = LENGTH) -> list[int]:
    """Returns `length` token ids. The first ids of different seeds below 290 differ."""
    return [3 + (seed * 31 + place * (7 + seed)) % 290 for place in range(length)]


PROMPTS = [prompt(1), prompt(2), prompt(3)]


@dataclass(frozen=True)
class Reference:
    """Two answers of the first server to each prompt: `computed`, when the server computed all
    pages, and `local`, when the prompt's full pages were in the server's memory. The answers may
    differ in rounding, because the server computed different numbers of tokens in one step.
    """

    computed: list[Told]
    local: list[Told]

    def right(self, place: int, told: Told) -> bool:
        if told.tokens["computed"] == LENGTH - CLAIMED:
            return told.answer.tokens == self.local[place].answer.tokens
        return told.answer.tokens in {
            self.computed[place].answer.tokens,
            self.local[place].answer.tokens,
        }


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def start(where: Path, model: Path) -> Start:
    def start(
        name: str,
        environment: dict[str, str] | None = None,
        metrics: bool = False,
        **settings: Any,
    ) -> Any:
        return SGLangServer(
            name=name,
            program=Path(sys.executable),
            model=model,
            log=where / f"{name}.log",
            max_tokens=1024,
            connector=storage(path=str(where / "store"), capacity="640MiB", **settings),
            extra_environment=environment or {},
            metrics=metrics,
        )

    return start


def ask(server: SGLangServer, place: int) -> Told:
    return server.generate(PROMPTS[place], ANSWER)


def raised(log: str) -> list[str]:
    """Returns the stack frames of the package `ritornello` in the tracebacks of SGLang's log."""
    return [line for line in log.splitlines() if "File " in line and "/ritornello/" in line]


@pytest.fixture(scope="module")
def reference(start: Start, where: Path) -> Reference:
    """Returns the answers of the first server. Detaches the server's storage and attaches it again,
    and checks that the counters keep their values.
    """
    with start("cold", metrics=True) as server:
        computed = [ask(server, place) for place in range(3)]
        assert [told.tokens["computed"] for told in computed] == [LENGTH] * 3
        local = [ask(server, place) for place in range(3)]
        assert [told.tokens["storage"] for told in local] == [0] * 3
        assert [told.tokens["computed"] for told in local] == [LENGTH - CLAIMED] * 3
        found = Reference(computed, local)
        wait_until_stored(where / "store", 3 * (LENGTH + ANSWER - 1) // PAGE)

        server.admin("DELETE", "/hicache/storage-backend")
        server.forget()
        detached = ask(server, 0)
        assert detached.tokens["storage"] == 0 and found.right(0, detached)
        extra = json.dumps(server.connector)
        attach = {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config_json": extra,
            "hicache_storage_prefetch_policy": "wait_complete",
        }
        server.admin("PUT", "/hicache/storage-backend", attach)
        server.forget()
        attached = ask(server, 0)
        assert attached.tokens["storage"] == CLAIMED and found.right(0, attached)
        counters, prefix = server.counters(), "sglang:ritornello_"
        assert counters.total(f"{prefix}hit_pages_total") == CLAIMED // PAGE
        assert counters.total(f"{prefix}loaded_pages_total") == CLAIMED // PAGE
        # The counters include the pages that the storage looked up and saved before it was
        # detached.
        assert counters.total(f"{prefix}probed_pages_total") > CLAIMED // PAGE
        assert counters.total(f"{prefix}saved_pages_total") >= 3 * (LENGTH + ANSWER - 1) // PAGE
        assert counters.total(f"{prefix}loaded_bytes_total") > 0
        assert counters.total(f"{prefix}errors_total") == 0
    log = (where / "cold.log").read_text()
    assert log.count("ritornello: detached") >= 1
    assert raised(log) == []
    return found


def test_new_server_hits_pages_of_previous(reference: Reference, start: Start, where: Path) -> None:
    with owner_of(where / "store") as owner, start("warm") as server:
        for place in (0, 1):
            told = ask(server, place)
            assert told.tokens["storage"] == CLAIMED
            assert told.tokens["computed"] == LENGTH - CLAIMED
            assert reference.right(place, told)
        # The owner of the store is killed while the server may be waiting for an answer of the
        # owner. Then the server becomes the owner.
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(ask, server, 2)
            owner.kill()
            assert reference.right(2, asked.result())
        for place in range(3):
            server.forget()
            told = ask(server, place)
            assert told.tokens["storage"] == CLAIMED
            assert reference.right(place, told)
        # After an update of the weights no stored page is found, even if the new weights are in the
        # same folder.
        server.admin("POST", "/update_weights_from_disk", {"model_path": str(server.model)})
        server.forget()
        told = ask(server, 0)
        assert told.tokens["storage"] == 0
        assert reference.right(0, told)
    log = (where / "warm.log").read_text()
    assert log.count("the weights changed") == 1
    assert raised(log) == []


def test_answers_are_right_under_injected_faults(
    reference: Reference, start: Start, where: Path
) -> None:
    faults = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.1",
    }
    came = []
    with start("faults", faults) as server:
        for _ in range(6):
            for place in range(3):
                told = ask(server, place)
                assert reference.right(place, told)
                came.append(told.tokens["storage"])
            server.forget()
    assert CLAIMED in came and 0 in came, "some loads must succeed and some must fail"
    log = (where / "faults.log").read_text()
    assert "injector enabled" in log
    assert raised(log) == []


def test_prompt_of_several_batches_is_read_ahead(where: Path) -> None:
    """SGLang reads the 150 pages of the prompt in two batches of at most 128 pages."""
    length = 150 * PAGE + 1
    server = SGLangServer(
        name="batches",
        program=Path(sys.executable),
        model=shared_model("demo"),
        log=where / "batches.log",
        max_tokens=6144,
        connector=storage(path=str(where / "batches"), capacity="2GiB"),
    )
    with server:
        computed = server.generate(prompt(4, length), ANSWER)
        assert computed.tokens["computed"] == length
        local = server.generate(prompt(4, length), ANSWER)
        wait_until_stored(where / "batches", 150)
        for _ in range(2):
            server.forget()
            told = server.generate(prompt(4, length), ANSWER)
            assert (told.tokens["storage"], told.tokens["computed"]) == (150 * PAGE, 1)
            assert told.answer.tokens == local.answer.tokens
    log = (where / "batches.log").read_text()
    assert "no batch is read ahead" not in log
    assert raised(log) == []
