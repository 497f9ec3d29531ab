"""Weights that change while vLLM serves: the changes of `weights.py`, and the pages found after
them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import BLOCK
from programs import ask_program

CLAIMED = 299 // BLOCK
Said = dict[str, dict[str, Any]]


def run(scenario: str, model: Path, store: Path) -> Said:
    log = store.parent / f"{scenario}.log"
    found: Said = ask_program("weights.py", scenario, model, store, log=log, timeout=600)
    return found


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("weights") / "store"


@pytest.fixture(scope="module")
def said(model: Path, store: Path) -> Said:
    return run("change", model, store)


@pytest.mark.parametrize(
    "change",
    ["after a call", "after a reload", "adapter replaced", "unannounced", "unannounced data"],
)
def test_no_page_of_earlier_weights_is_loaded(said: Said, change: str) -> None:
    assert said[change]["loaded_pages"] == 0
    assert said[change]["tokens"] == said[change]["expected"]


def test_changed_weights_change_the_answers(said: Said) -> None:
    assert said["after a call"]["tokens"] != said["files 1"]["tokens"]
    assert said["adapter replaced"]["tokens"] != said["reloaded, adapter"]["tokens"]
    assert said["unannounced"]["tokens"] != said["reloaded"]["tokens"]
    assert said["unannounced data"]["tokens"] == said["reloaded"]["tokens"], (
        "the second unannounced change must restore the reloaded weights, and thus their answer"
    )


def test_nothing_is_saved_before_reset(said: Said) -> None:
    for name in ("no reset", "unannounced", "unannounced data"):
        assert said[name]["saved_pages"] == 0, name
    assert said["no reset, again"]["loaded_pages"] == 0


def test_new_epoch_is_served(said: Said) -> None:
    again = said["again in the new epoch"]
    assert again["loaded_pages"] == CLAIMED
    assert again["tokens"] == again["expected"] == said["new epoch"]["tokens"]


def test_empty_engine_needs_no_reset(said: Said) -> None:
    assert said["empty"]["loaded_pages"] == 0
    assert said["empty, again"]["loaded_pages"] == CLAIMED
    assert said["empty, again"]["tokens"] == said["empty, again"]["expected"]


def test_restart_finds_pages_of_file_weights_only(model: Path, store: Path, said: Said) -> None:
    """A restarted engine finds no page that was computed after a change of weights, even if the
    weights of the files had been restored before the page was computed.
    """
    files = run("restart", model, store)
    assert {name: answer["loaded_pages"] for name, answer in files.items()} == {
        "files 1": CLAIMED,
        "files 3": 0,
        "files 4": 0,
        "files 5": 0,
    }
    assert files["files 1"]["tokens"] == said["files 1"]["tokens"]
    assert all(answer["tokens"] == answer["expected"] for answer in files.values())


@pytest.mark.long
def test_changed_weights_of_one_rank_stop_all_ranks(model: Path, tmp_path: Path) -> None:
    found = run("ranks", model, tmp_path / "store")
    for name in ("one rank", "one rank, fresh", "one rank, reset"):
        assert found[name]["loaded_pages"] == 0, name
    assert found["one rank, fresh"]["saved_pages"] == 0
    assert found["one rank"]["tokens"] != found["files 1"]["tokens"]
    again = found["again in the new epoch"]
    assert again["loaded_pages"] == 299 // 64
    assert again["tokens"] == again["expected"] == found["one rank"]["tokens"]
