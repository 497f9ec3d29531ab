"""Invalid calls raise a clear error, and invalid puts store nothing."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import CoreLog, blank, keys_of, pages_of

import ritornello as rt
from ritornello.errors import InvalidError, RitornelloError

PAGE = 4096
SCOPE = rt.Scope.opaque("bad input", PAGE)
KEYS = keys_of("bad input", 3)


class GpuTensor:
    nbytes = PAGE

    class device:  # noqa: N801
        type = "cuda"

    def data_ptr(self) -> int:
        return 4096

    def is_contiguous(self) -> bool:
        return True


BAD_PAGES: dict[str, tuple[Any, str]] = {
    "too few": ([b"0" * PAGE] * 2, "3 keys, but 2 pages"),
    "too many": ([b"0" * PAGE] * 4, "3 keys, but 4 pages"),
    "too short": ([b"0" * PAGE, b"0" * 5, b"0" * PAGE], "page 1 has 5 bytes"),
    "pieces too long": ([[b"0" * PAGE, b"1"]] * 3, "page 0 has 4097 bytes"),
    "text": (["0" * PAGE] * 3, "page 0 is of type str"),
    "numbers": (b"012", "page 0 is of type int"),
    "text in pieces": ([["0" * PAGE]] * 3, "piece 0 of page 0 is of type str"),
    "no list": (7, "list of buffers"),
    "not contiguous": (blank(PAGE, 6).T[::2], "page 0 is not one contiguous piece"),
    "on a GPU": ([GpuTensor()] * 3, "page 0 is in cuda memory"),
}


@pytest.mark.parametrize("name", BAD_PAGES)
def test_put_rejects_invalid_pages(store: rt.Store, name: str) -> None:
    pages, advice = BAD_PAGES[name]
    with pytest.raises(InvalidError, match=advice):
        store.put_batch(SCOPE, KEYS, pages)
    with pytest.raises(InvalidError, match=advice):
        store.submit_put(SCOPE, KEYS, pages, copy=True)
    assert store.probe(SCOPE, KEYS) == 0


def overlapping() -> Any:
    memory = np.zeros(2 * PAGE + 1, np.uint8)
    return [memory[:PAGE], memory[PAGE - 1 : 2 * PAGE - 1], bytearray(PAGE)]


BAD_OUT: dict[str, tuple[Callable[[], Any], str]] = {
    "too few": (lambda: blank(2, PAGE), "3 keys, but 2 pages"),
    "read-only": (lambda: [bytes(PAGE)] * 3, "page 0 is read-only"),
    "the same page twice": (lambda: [bytearray(PAGE)] * 3, "pages 0 and 1 overlap"),
    "overlapping pages": (overlapping, "pages 0 and 1 overlap"),
    "overlapping pieces": (
        lambda: [[row, row] for row in blank(3, PAGE // 2)],
        "the pieces of page 0 overlap",
    ),
    "a pool's page twice": (
        lambda: rt.PagePool([blank(4, PAGE)], [PAGE]).pages([2, 1, 2]),
        "ids 0 and 2 both name page 2",
    ),
    "a read-only pool": (
        lambda: rt.PagePool([bytes(3 * PAGE)], [PAGE]).pages([0, 1, 2]),
        "buffer 0 of the pool is read-only",
    ),
    "a pool with a different page size": (
        lambda: rt.PagePool([blank(3, PAGE)], [PAGE // 2]).pages([0, 1, 2]),
        "pages of the pool have 2048 bytes",
    ),
}


@pytest.mark.parametrize("name", BAD_OUT)
def test_get_rejects_invalid_buffers(store: rt.Store, name: str) -> None:
    make, advice = BAD_OUT[name]
    store.put_batch(SCOPE, KEYS, pages_of(KEYS, PAGE))
    with pytest.raises(InvalidError, match=advice):
        store.get_batch(SCOPE, KEYS, make())
    with pytest.raises(InvalidError, match=advice):
        store.submit_get(SCOPE, KEYS, make())


def test_interleaved_pool_buffers_are_accepted(store: rt.Store) -> None:
    memory = blank(3, 2 * PAGE).reshape(-1)
    halves = rt.PagePool([memory, memory[PAGE:]], [PAGE, PAGE], strides=[2 * PAGE, 2 * PAGE])
    scope = rt.Scope.opaque("halves", 2 * PAGE)
    assert store.get_batch(scope, KEYS, halves.pages([0, 1, 2])) == 0
    once_too_often = rt.PagePool([memory, memory], [PAGE, PAGE], strides=[2 * PAGE, 2 * PAGE])
    with pytest.raises(InvalidError, match="the pieces of page 0 overlap"):
        store.get_batch(scope, KEYS, once_too_often.pages([0, 1, 2]))


@pytest.mark.parametrize(
    ("buffers", "page_bytes", "strides", "advice"),
    [
        ([], [], None, "0 buffers"),
        ([bytearray(8)], [8, 8], None, "1 buffers, 2 page_bytes"),
        ([bytearray(8)], [0], None, "buffer 0"),
        ([bytearray(8)], [8], [4], "buffer 0"),
        (["text"], [8], None, "buffer 0 is of type str"),
    ],
)
def test_invalid_pools_are_rejected(
    buffers: Any, page_bytes: Any, strides: Any, advice: str
) -> None:
    with pytest.raises(InvalidError, match=advice):
        rt.PagePool(buffers, page_bytes, strides=strides)


@pytest.mark.parametrize("page", [4, -1, "1", 1 << 70])
def test_ids_outside_pool_are_rejected(page: Any) -> None:
    with pytest.raises(InvalidError, match="id 1 is"):
        rt.PagePool([blank(4, 64)], [64]).pages([0, page])


@pytest.mark.parametrize(
    ("keys", "advice"),
    [
        ([KEYS[0], b"short", KEYS[1]], "8 to 64 bytes"),
        ([KEYS[0], b"l" * 65, KEYS[1]], "8 to 64 bytes"),
        ([KEYS[0], "text of 9", KEYS[1]], "key 1 is of type str"),
        (7, "list of bytes"),
    ],
)
def test_invalid_keys_are_rejected(store: rt.Store, keys: Any, advice: str) -> None:
    pages = pages_of(KEYS, PAGE)
    calls: list[Callable[[], object]] = [
        lambda: store.put_batch(SCOPE, keys, pages),
        lambda: store.get_batch(SCOPE, keys, pages),
        lambda: store.submit_put(SCOPE, keys, pages),
        lambda: store.submit_get(SCOPE, keys, pages),
        lambda: store.probe(SCOPE, keys),
        lambda: store.lease_prefix(SCOPE, keys),
        lambda: store.exists(SCOPE, keys),
        lambda: store.touch(SCOPE, keys),
        lambda: store.delete(SCOPE, keys),
    ]
    for call in calls:
        with pytest.raises(InvalidError, match=advice):
            call()


def test_repeated_key_in_put_is_rejected(store: rt.Store) -> None:
    with pytest.raises(InvalidError):
        store.put_batch(SCOPE, [KEYS[0], KEYS[1], KEYS[0]], pages_of(KEYS, PAGE))
    assert store.exists(SCOPE, KEYS) == [False] * 3


@pytest.mark.parametrize(
    ("other", "warned"),
    [
        (rt.Scope.opaque("bad input", PAGE, chained=True), "chained true and false"),
        (rt.Scope.opaque("bad input", 2 * PAGE), f"page_bytes {2 * PAGE} and {PAGE}"),
    ],
)
def test_other_chaining_or_page_size_makes_other_scope(
    store: rt.Store, core_log: CoreLog, other: rt.Scope, warned: str
) -> None:
    store.put_batch(SCOPE, KEYS, pages_of(KEYS, PAGE))
    assert other.id != SCOPE.id
    assert other != SCOPE
    assert store.probe(other, KEYS) == 0
    assert not core_log.take()
    store.put_batch(other, KEYS, pages_of(KEYS, other.page_bytes))
    assert len(core_log.take(f"differs from a registered scope in {warned} only")) == 1
    assert store.probe(SCOPE, KEYS) == 3


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_invalid_durations_are_rejected(store: rt.Store, seconds: float) -> None:
    with pytest.raises(InvalidError, match="seconds, zero or more"):
        store.put_batch(SCOPE, KEYS, pages_of(KEYS, PAGE), timeout=seconds)
    with pytest.raises(InvalidError, match="seconds, zero or more"):
        store.lease_prefix(SCOPE, KEYS, ttl=seconds)


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"page_tokens": 0}, "page_tokens"),
        ({"layers": (3, 3)}, "layer"),
        ({"dtype": "unheard-of"}, "page_bytes"),
        ({"page_bytes": 1}, "page_bytes disagrees"),
        ({"layout": "my_own"}, "page_bytes"),
    ],
)
def test_invalid_scopes_are_rejected(changes: dict[str, Any], advice: str) -> None:
    fields: dict[str, Any] = {
        "model": "m",
        "dtype": "bfloat16",
        "page_tokens": 16,
        "layers": (0, 2),
        "kv_heads": (0, 2),
        "head_dim": 64,
    }
    with pytest.raises(InvalidError, match=advice):
        rt.Scope(**{**fields, **changes})


def test_empty_batches_are_accepted(store: rt.Store) -> None:
    assert store.put_batch(SCOPE, [], []) == 0
    assert store.get_batch(SCOPE, [], []) == 0
    assert store.probe(SCOPE, []) == 0
    assert store.exists(SCOPE, []) == []
    ticket = store.submit_get(SCOPE, [], [])
    outcome = ticket.wait(10)
    assert outcome is not None
    assert (outcome.pages, outcome.reason, outcome.ok) == (0, "", [])


def test_errors_have_kind_and_builtin_base() -> None:
    assert issubclass(InvalidError, ValueError)
    assert issubclass(InvalidError, RitornelloError)
    kinds = {cls.kind for cls in [InvalidError, rt.errors.RetryError, rt.errors.FatalError]}
    assert kinds == {"invalid", "retry", "fatal"}
