"""Tensors of torch in CPU memory as pages and weights. Skipped where torch is not installed: `make`
runs these tests in the environment of an engine.
"""

from typing import Any

import pytest
from support import keys_of

import ritornello as rt
from ritornello.vllm.weights.parameters import Parameters, sample_tensors

torch = pytest.importorskip("torch")


def test_bfloat16_tensors_are_accepted(store: rt.Store) -> None:
    shape = (4, 2, 16, 64)
    pages = torch.randn(shape).to(torch.bfloat16)
    out = torch.zeros(shape, dtype=torch.bfloat16)
    scope = rt.Scope.opaque("torch", pages[0].nbytes)
    keys = keys_of("torch", 4)
    assert store.put_batch(scope, keys, list(pages)) == 4
    assert store.get_batch(scope, keys, [[k, v] for k, v in out]) == 4
    assert torch.equal(out, pages)


def test_get_fills_only_its_blocks_of_a_tensor_pool(store: rt.Store) -> None:
    memory = torch.zeros((8, 1024), dtype=torch.float8_e4m3fn)
    pool = rt.PagePool([memory], [1024])
    scope = rt.Scope.opaque("torch pool", 1024)
    keys = keys_of("torch pool", 2)
    store.put_batch(scope, keys, [b"\x01" * 1024, b"\x02" * 1024])
    assert store.get_batch(scope, keys, pool.pages([5, 2])) == 2
    raw = memory.view(torch.uint8)
    assert (raw[5] == 1).all()
    assert (raw[2] == 2).all()
    assert (raw[0] == 0).all()


def test_unusable_tensors_are_refused(store: rt.Store) -> None:
    scope = rt.Scope.opaque("torch bad", 4096)
    keys = keys_of("torch bad", 1)
    with pytest.raises(rt.errors.InvalidError, match="not contiguous"):
        store.put_batch(scope, keys, [torch.zeros(64, 64, dtype=torch.uint8).T])
    with pytest.raises(rt.errors.InvalidError, match="meta memory"):
        store.put_batch(scope, keys, [torch.zeros(4096, dtype=torch.uint8, device="meta")])


def wrapping(inner: Any) -> Any:
    """Returns a parameter whose tensor has no memory and wraps `inner`, like torchao's tensors."""

    class Wrapper(torch.Tensor):  # type: ignore[misc, name-defined]
        @staticmethod
        def __new__(cls: Any, inner: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["inner"], None

        @classmethod
        def __torch_dispatch__(
            cls: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "detach" in str(function):
                return cls(args[0].inner)
            raise NotImplementedError(function)

    return torch.nn.Parameter(Wrapper(inner), requires_grad=False)


def test_tensor_without_memory_has_no_sample() -> None:
    found = sample_tensors([wrapping(torch.ones(4096)), torch.zeros(64, dtype=torch.uint8)])
    assert found == bytes(64)


def test_writes_to_wrapped_tensor_are_detected() -> None:
    inner, model = torch.ones(4096), torch.nn.Linear(8, 8)
    model.weight = wrapping(inner)
    parameters = Parameters(model.named_modules, sample_tensors)
    assert not parameters.state_changed()
    assert not parameters.sample_changed()
    inner.data.fill_(2)
    assert not parameters.state_changed()
    assert parameters.sample_changed()
    inner.fill_(3)
    assert parameters.state_changed()
