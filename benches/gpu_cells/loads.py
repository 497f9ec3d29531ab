"""Pages from the device to a store and back, in memory and on a disk."""

import os
from pathlib import Path

import torch
from ritornello import DevicePool, Scope, Store, destroy

from gpu_cells.rig import GIB, Memory, Rig, Shape, timed

ROUNDS = 3


def store(rig: Rig) -> list[dict[str, object]]:
    """Puts and gets of pages of some shapes. All bytes are compared after a get."""
    total = (16 << 20) if rig.emulated else 2 * GIB
    rows: list[dict[str, object]] = []
    memory_folder = Path("/dev/shm") / f"ritornello-gpu-{os.getpid()}"
    for shape in rig.shapes[:1] + rig.shapes[2:4]:
        memory = rig.memory(shape, total // shape.page)
        for place, folder in (("memory", memory_folder), ("disk", rig.folder / "store")):
            with Store.open(folder, 2 * total + GIB) as opened:
                rows += _transfers(rig, opened, place, shape, memory)
            destroy(folder)
        del memory
    return rows


def _transfers(
    rig: Rig, opened: Store, place: str, shape: Shape, memory: Memory
) -> list[dict[str, object]]:
    scope = Scope.opaque(shape.name, shape.page, chained=True)
    pool = rig.pool(memory)
    count = memory.blocks
    nbytes = count * shape.page
    order = torch.randperm(count).tolist()
    keys = [b"%032d" % page for page in range(count)]
    whole = [tensor.clone() for tensor in memory.tensors]
    reads = {"memory": "to device", "disk": "disk read"}[place]

    with timed() as times:
        put_all(rig, opened, scope, keys, pool, order)
    rows = [_row(place, shape, "put", nbytes, times.wall, times.cpu, rig.link, "from device")]

    best = None
    for _ in range(ROUNDS):
        for tensor in memory.tensors:
            tensor.fill_(0x77)
        rig.finish()
        with timed() as times:
            outcome = opened.submit_get(scope, keys, pool.pages(order)).wait()
        _check(outcome, count, "get")
        for number, (tensor, expected) in enumerate(zip(memory.tensors, whole, strict=True)):
            if not torch.equal(tensor, expected):
                raise AssertionError(f"{place}: tensor {number} has wrong bytes after a get")
        if best is None or times.wall < best.wall:
            best = times
    assert best is not None
    rows.append(_row(place, shape, "get", nbytes, best.wall, best.cpu, rig.link, reads))
    return rows


def put_all(
    rig: Rig, opened: Store, scope: Scope, keys: list[bytes], pool: DevicePool, blocks: list[int]
) -> None:
    """Puts all pages. Pages for which no pinned memory was free are put again."""
    stored = 0
    while stored < len(keys):
        ticket = opened.submit_put(
            scope,
            keys[stored:],
            pool.pages(blocks[stored:]),
            parent=keys[stored - 1] if stored else None,
            after=rig.stream(),
        )
        if not ticket.order(rig.stream()):
            raise AssertionError("a put was not gathered in time")
        outcome = ticket.wait()
        if outcome is None or not outcome.pages:
            raise AssertionError(f"a put stored nothing: {outcome}")
        stored += outcome.pages


def _check(outcome: object, count: int, op: str) -> None:
    pages = getattr(outcome, "pages", None)
    if pages != count:
        raise AssertionError(f"a {op} moved {pages} of {count} pages: {outcome}")


def _row(
    place: str,
    shape: Shape,
    op: str,
    nbytes: int,
    wall: float,
    cpu: float,
    link: dict[str, float],
    limit: str,
) -> dict[str, object]:
    if place == "disk" and op == "put":
        limit = "disk write"
    return {
        "place": place,
        "shape": shape.name,
        "op": op,
        "gb_s": nbytes / wall / 1e9,
        "limit": limit,
        "of_limit": nbytes / wall / min(link[limit], link["to device"]),
        "cpu_s_gib": cpu / (nbytes / GIB),
    }
