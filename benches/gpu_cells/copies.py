"""Copies between slots and blocks: our ways, and what engines do without us."""

from collections.abc import Callable, Iterator

import torch

from gpu_cells.rig import Memory, Rig, Shape, bytes_of, timed

BYTES_MAX = 1 << 30
BLOCKS = (64, 512, 4096)
WAYS = ("kernel:2", "kernel:4", "kernel:8", "kernel:12", "copies")
# Moves that are in flight together, so that the time of one launch is hidden.
MOVES = 4
ROUNDS = 3
# Above this number of pieces, one call for each takes too long to measure.
CALLS_MAX = 40_000
PROGRAMS = 12


def ways(rig: Rig) -> list[dict[str, object]]:
    """The rate and the processor time of each way, for page shapes and numbers of pages."""
    rows: list[dict[str, object]] = []
    for shape in rig.shapes:
        most = (8 << 20 if rig.emulated else BYTES_MAX) // shape.page
        memory = rig.memory(shape, most)
        for blocks in sorted({min(blocks, most) for blocks in BLOCKS}):
            for way in WAYS:
                rows += _directions(rig, shape, memory, blocks, way)
            if not rig.emulated:
                rows += _others(rig, shape, memory, blocks)
        del memory
    return rows


def _row(rig: Rig, shape: Shape, blocks: int, way: str, direction: str) -> dict[str, object]:
    return {
        "shape": shape.name,
        "piece": shape.piece,
        "blocks": blocks,
        "way": way,
        "direction": direction,
    }


def _measured(
    rig: Rig, nbytes: int, direction: str, times: Iterator[tuple[float, float]]
) -> dict[str, float]:
    """Returns the rate of the fastest round, also as a fraction of the link's, and its processor
    time.
    """
    wall, cpu = min(times)
    link = rig.link["to device" if direction == "scatter" else "from device"]
    return {
        "gb_s": nbytes / wall / 1e9,
        "of_link": nbytes / wall / link,
        "cpu_us": cpu * 1e6,
        "cpu_s_gib": cpu / (nbytes / (1 << 30)),
    }


def _directions(
    rig: Rig, shape: Shape, memory: Memory, blocks: int, way: str
) -> Iterator[dict[str, object]]:
    pool = rig.pool(memory, way)
    order = torch.randperm(memory.blocks)[:blocks].tolist()
    pages = pool.pages(order)
    slots = rig.slots(pool.page_bytes, blocks)
    bytes_of(slots, blocks).fill_(1)
    for direction, submit in (("scatter", pages.scatter), ("gather", pages.gather)):

        def rounds(submit: Callable[..., object] = submit) -> Iterator[tuple[float, float]]:
            for _ in range(ROUNDS + 1):
                with timed() as times:
                    moves = [submit(slots) for _ in range(MOVES)]
                    if not all(move.wait() for move in moves):  # type: ignore[attr-defined]
                        raise AssertionError("a move did not end")
                yield times.wall / MOVES, times.cpu / MOVES

        yield _row(rig, shape, blocks, way, direction) | _measured(
            rig, blocks * shape.page, direction, rounds()
        )


def _others(
    rig: Rig, shape: Shape, memory: Memory, blocks: int
) -> Iterator[dict[str, object]]:
    """Scatters without this project, from pinned pages of the same layout."""
    host = torch.empty((blocks, shape.layers, shape.piece), dtype=torch.uint8, pin_memory=True)
    order = torch.randperm(memory.blocks)[:blocks].tolist()
    index = torch.tensor(order, device=rig.torch_device)

    def each() -> None:
        for page, block in enumerate(order):
            for layer, view in enumerate(memory.views):
                view[block].copy_(host[page, layer], non_blocking=True)

    def index_copy() -> None:
        there = host.to(rig.torch_device, non_blocking=True)
        for layer, view in enumerate(memory.views):
            view.index_copy_(0, index, there[:, layer])

    table = torch.tensor(
        [
            (host[page, layer].data_ptr(), view.data_ptr() + block * view.stride(0))
            for page, block in enumerate(order)
            for layer, view in enumerate(memory.views)
        ],
        dtype=torch.int64,
    )
    source, target = table[:, 0].contiguous(), table[:, 1].contiguous()

    def triton() -> None:
        _copy_pieces(source, target, shape.piece)

    calls = [("torch index_copy_", index_copy), ("one Triton program a piece", triton)]
    if blocks * shape.layers <= CALLS_MAX:
        calls.append(("one torch copy_ a piece", each))
    for way, call in calls:

        def rounds(call: Callable[[], None] = call) -> Iterator[tuple[float, float]]:
            for _ in range(ROUNDS + 1):
                rig.finish()
                with timed() as times:
                    call()
                    rig.finish()
                yield times.wall, times.cpu

        yield _row(rig, shape, blocks, way, "scatter") | _measured(
            rig, blocks * shape.page, "scatter", rounds()
        )


def _copy_pieces(source: torch.Tensor, target: torch.Tensor, piece: int) -> None:
    """Pieces from mapped host memory by a Triton kernel: each of 12 programs copies whole pieces in
    turn, in chunks of up to 8 KiB. vLLM 0.32 copies pieces below 28 KiB in this way.
    """
    from gpu_cells.triton_copy import copy_pieces  # Triton exists only where there is a GPU.

    copy_pieces[(min(PROGRAMS, len(source)),)](
        source.to("cuda", non_blocking=True),
        target.to("cuda", non_blocking=True),
        piece // 8,
        len(source),
        CHUNK=1024,
    )


def interference(rig: Rig) -> list[dict[str, object]]:
    """The time of matrix products beside scatters, as a multiple of their time alone."""
    if rig.emulated:
        return []
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def products(count: int = 20) -> float:
        rig.finish()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            a @ b
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    shape = rig.shapes[2]
    memory = rig.memory(shape, 1024)
    rows: list[dict[str, object]] = []
    products()
    alone = min(products() for _ in range(3))
    for way in WAYS:
        pool = rig.pool(memory, way)
        slots = rig.slots(pool.page_bytes, 512)
        pages = pool.pages(list(range(512)))
        with timed() as times:
            moves = [pages.scatter(slots) for _ in range(16)]
            beside = products()
            for move in moves:
                move.wait()
        rows.append(
            {
                "way": way,
                "product_ms": alone,
                "slowdown": beside / alone,
                "scatter_gb_s": 16 * 512 * shape.page / times.wall / 1e9,
            }
        )
    return rows
