"""CPU tensors of torch. Runs where torch is: in the environment of an engine."""

import pytest
from support import keys_of

import ritornello as rt

torch = pytest.importorskip("torch")


def test_tensors_of_a_type_that_numpy_lacks(store: rt.Store) -> None:
    shape = (4, 2, 16, 64)
    pages = torch.randn(shape).to(torch.bfloat16)
    out = torch.zeros(shape, dtype=torch.bfloat16)
    scope = rt.Scope.opaque("torch", pages[0].nbytes)
    keys = keys_of("torch", 4)
    assert store.put_batch(scope, keys, list(pages)) == 4
    assert store.get_batch(scope, keys, [[k, v] for k, v in out]) == 4
    assert torch.equal(out, pages)


def test_a_pool_over_a_tensor(store: rt.Store) -> None:
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


def test_tensors_that_cannot_be_used(store: rt.Store) -> None:
    scope = rt.Scope.opaque("torch bad", 4096)
    keys = keys_of("torch bad", 1)
    with pytest.raises(rt.errors.InvalidError, match="not contiguous"):
        store.put_batch(scope, keys, [torch.zeros(64, 64, dtype=torch.uint8).T])
    with pytest.raises(rt.errors.InvalidError, match="meta memory"):
        store.put_batch(scope, keys, [torch.zeros(4096, dtype=torch.uint8, device="meta")])
