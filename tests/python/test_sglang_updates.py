"""Updates of weights and flushes, observed on stand-ins for SGLang's classes."""

from pathlib import Path
from typing import Any

import pytest
from support import blank, keys_of, pages_of

import ritornello as rt
from ritornello.sglang.interface import HARMLESS_METHODS, RECORDER, UPDATE_METHODS, watch_obstacle
from ritornello.sglang.meter import RateMeter
from ritornello.sglang.settings import Settings
from ritornello.sglang.store import SGLangStore
from ritornello.sglang.updates import WeightUpdates


def classes(**others: Any) -> tuple[Any, Any, Any]:
    """Returns stand-ins for SGLang's updater, manager and controller, with the methods of the
    tested versions; `others` adds or replaces methods of the updater.
    """

    def answer(self: object, said: str = "") -> str:
        return said

    def reset(self: Any) -> None:
        self.attempts += 1
        if self.attempts == self.failing:
            raise RuntimeError("a thread is still alive")

    updater = type(
        "Updater", (), dict.fromkeys((*UPDATE_METHODS, *HARMLESS_METHODS), answer) | others
    )
    manager = type("Manager", (), {RECORDER: answer})
    members = {"reset": reset, "attempts": 0, "failing": 0, "storage_backend": None}
    return updater, manager, type("Controller", (), members)


class Storage:
    def __init__(self) -> None:
        self.told = 0

    def on_flush(self) -> None:
        self.told += 1


@pytest.mark.parametrize("name", UPDATE_METHODS)
def test_every_weight_update_is_observed(name: str) -> None:
    updates, (updater, manager, controller) = WeightUpdates(), classes()
    assert updates.watch(updater, manager, controller)
    assert getattr(updater(), name)("done") == "done"
    assert updates.epoch != updates.flushed == b""
    controller().reset()
    assert updates.epoch == updates.flushed != b""


def test_unknown_method_counts_as_update(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    updates, found = WeightUpdates(), classes(rotate_experts=lambda self: None)
    assert watch_obstacle(*found) == ""
    updates.watch(*found)
    assert "rotate_experts" in caplog.text
    found[0]().rotate_experts()
    assert updates.epoch != updates.flushed


def test_update_that_sglang_records_begins_epoch() -> None:
    updates, (updater, manager, controller) = WeightUpdates(), classes()
    updates.watch(updater, manager, controller)
    getattr(manager(), RECORDER)()
    assert updates.epoch != updates.flushed


def test_harmless_methods_begin_no_epoch() -> None:
    updates, (updater, manager, controller) = WeightUpdates(), classes()
    updates.watch(updater, manager, controller)
    for name in HARMLESS_METHODS:
        getattr(updater(), name)()
    controller().reset()
    assert updates.epoch == updates.flushed == b""


def test_failed_reset_is_not_flush() -> None:
    updates, (updater, manager, controller) = WeightUpdates(), classes()
    updates.watch(updater, manager, controller)
    getattr(updater(), UPDATE_METHODS[0])()
    made = controller()
    made.failing, made.storage_backend = 1, Storage()
    with pytest.raises(RuntimeError, match="still alive"):
        made.reset()
    assert updates.epoch != updates.flushed
    assert made.storage_backend.told == 0
    made.reset()
    assert updates.epoch == updates.flushed
    assert made.storage_backend.told == 1


def test_classes_are_wrapped_once() -> None:
    updates, found = WeightUpdates(), classes()
    assert updates.watch(*found)
    assert not updates.watch(*found)
    # The check of SGLang's interface accepts wrapped methods.
    assert watch_obstacle(*found) == ""


def test_updated_weights_miss_until_flush(
    tmp_path: Path,
) -> None:
    updates, meter = WeightUpdates(), RateMeter()
    store = SGLangStore(
        Settings(str(tmp_path / "store"), "640MiB"), meter, lambda: updates.epoch != b""
    )
    assert store.open()
    scope = rt.Scope(
        model="m", dtype="bfloat16", page_tokens=16, layers=(0, 1), kv_heads=(0, 1), head_dim=64
    )
    keys = keys_of("weights", 3)
    pages = pages_of(keys, scope.page_bytes)
    assert store.put(scope, keys, pages, None) == 3
    updates.begin()
    assert store.find([scope], keys, None, 16) == 0
    assert store.exists(scope, keys) == [False] * 3
    assert store.get(scope, keys, blank(3, scope.page_bytes)) == 0
    assert store.put(scope, keys, pages, None) == 0
    counts = meter.counts()
    assert counts["missed_pages:before_reset"] == counts["skipped_pages:before_reset"] == 3
    updates.epoch = b""
    assert store.find([scope], keys, None, 16) == 3
    store.close()


def test_pages_loaded_during_update_are_not_reported(tmp_path: Path) -> None:
    meter = RateMeter()
    answers = iter([False, True])
    store = SGLangStore(Settings(str(tmp_path / "store"), "640MiB"), meter)
    assert store.open()
    scope = rt.Scope.opaque("weights", 4096, chained=True)
    keys = keys_of("weights", 3)
    assert store.put(scope, keys, pages_of(keys, scope.page_bytes), None) == 3
    store._stale = lambda: next(answers)
    assert store.get(scope, keys, blank(3, scope.page_bytes)) == 0
    assert meter.counts()["missed_pages:before_reset"] == 3
    assert not meter.counts().get("loaded_pages")
    store.close()


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (classes(**{UPDATE_METHODS[0]: None}), f"Updater has no {UPDATE_METHODS[0]}"),
        ((*classes()[:2], type("Controller", (), {})), "Controller has no reset"),
        ((classes()[0], type("Manager", (), {}), classes()[2]), f"Manager has no {RECORDER}"),
    ],
)
def test_unobservable_updates_are_named(found: Any, problem: str) -> None:
    assert problem in watch_obstacle(*found)
