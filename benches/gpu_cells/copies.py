"""Measures copies between pinned slots and blocks on the device, by each way of this project, and
by PyTorch and Triton without it; and how much moves slow down matrix products.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benches.gpu_cells.rig import Memory, Rig, Row, Rows, Shape, bytes_of, timed
from ritornello import DeviceMove, DeviceSlots

# Maximum bytes of the KV memory of one page shape, on a GPU.
BYTES_MAX = 1 << 30
# Numbers of blocks, each with one page, that a move copies; at most all blocks of the KV memory.
BLOCKS = (64, 512, 4096)
# "kernel:N" moves by a kernel on N blocks of threads, "copies" by the copy engines. With "auto" the
# pool chooses between a kernel and the copy engines for each move.
WAYS = ("kernel:2", "kernel:4", "kernel:8", "kernel:12", "copies", "auto")
# Number of moves that are in flight together, so that launching a move overlaps with other moves.
MOVES = 4
ROUNDS = 3
# Maximum number of pieces for which one torch copy per piece is measured: more take too long.
CALLS_MAX = 40_000
# Number of programs (blocks of threads) of the Triton kernel.
PROGRAMS = 12
# For `interference`: pages of a move, and numbers of moves and matrix products that run
# concurrently.
PAGES, BESIDE, PRODUCTS = 512, 16, 20


@dataclass(frozen=True)
class Copy:
    """A way to copy the pages of one measurement. One call of `run` copies them `times` times."""

    way: str
    direction: str
    run: Callable[[], None]
    times: int = 1


def ways(rig: Rig) -> Rows:
    """Returns the rate and the processor time of each way, for page shapes and numbers of pages."""
    rows: Rows = []
    for shape in rig.shapes:
        most = (8 << 20 if rig.emulated else BYTES_MAX) // shape.page
        memory = rig.memory(shape, most)
        for blocks in sorted({min(blocks, most) for blocks in BLOCKS}):
            order = torch.randperm(memory.blocks)[:blocks].tolist()
            rows += _ways(rig, shape, memory, order)
        del memory
    return rows


def _ways(rig: Rig, shape: Shape, memory: Memory, order: list[int]) -> Rows:
    slots = rig.slots(shape.page, len(order))
    bytes_of(slots, len(order)).fill_(1)
    copies: list[Copy] = []
    for way in WAYS:
        pages = rig.pool(memory, way).pages(order)
        copies.append(_moves(way, "scatter", pages.scatter, slots))
        copies.append(_moves(way, "gather", pages.gather, slots))
    if not rig.emulated:
        copies += _alternatives(rig, shape, memory, order)
    row = {"shape": shape.name, "piece": shape.piece, "blocks": len(order)}
    return [{**row, **_measured(rig, copy, len(order) * shape.page)} for copy in copies]


def _measured(rig: Rig, copy: Copy, nbytes: int) -> Row:
    """Returns the rate and the processor time of the fastest round, and the rate as a fraction of
    the link's rate.
    """
    rounds = []
    # One more round than `ROUNDS`, because the first includes one-time preparations.
    for _ in range(ROUNDS + 1):
        rig.finish()
        with timed() as times:
            copy.run()
        rounds.append((times.wall / copy.times, times.cpu / copy.times))
    wall, cpu = min(rounds)
    link = rig.limit("to device" if copy.direction == "scatter" else "from device")
    return {
        "way": copy.way,
        "direction": copy.direction,
        "gb_s": nbytes / wall / 1e9,
        "of_link": nbytes / wall / link,
        "cpu_us": cpu * 1e6,
        "cpu_s_gib": cpu / (nbytes / (1 << 30)),
    }


def _moves(
    way: str, direction: str, submit: Callable[[DeviceSlots], DeviceMove], slots: DeviceSlots
) -> Copy:
    def run() -> None:
        moves = [submit(slots) for _ in range(MOVES)]
        if not all(move.wait() for move in moves):
            raise AssertionError(f"a {direction} by {way} did not end")

    return Copy(way, direction, run, MOVES)


def _alternatives(rig: Rig, shape: Shape, memory: Memory, order: list[int]) -> list[Copy]:
    """Returns scatters by PyTorch or Triton, without this project, from pinned pages without
    gaps.
    """
    host = torch.empty((len(order), shape.layers, shape.piece), dtype=torch.uint8, pin_memory=True)
    index = torch.tensor(order, device=rig.torch_device)
    table = torch.tensor(
        [
            (host[page, layer].data_ptr(), view.data_ptr() + block * view.stride(0))
            for page, block in enumerate(order)
            for layer, view in enumerate(memory.views)
        ],
        dtype=torch.int64,
    )
    sources, targets = table[:, 0].contiguous(), table[:, 1].contiguous()

    def each() -> None:
        for page, block in enumerate(order):
            for layer, view in enumerate(memory.views):
                view[block].copy_(host[page, layer], non_blocking=True)
        rig.finish()

    def index_copy() -> None:
        there = host.to(rig.torch_device, non_blocking=True)
        for layer, view in enumerate(memory.views):
            view.index_copy_(0, index, there[:, layer])
        rig.finish()

    def triton() -> None:
        _copy_pieces(sources, targets, shape.piece)
        rig.finish()

    calls = {"torch index_copy_": index_copy, f"Triton, {PROGRAMS} programs": triton}
    if len(order) * shape.layers <= CALLS_MAX:
        calls["one torch copy_ per piece"] = each
    return [Copy(way, "scatter", run) for way, run in calls.items()]


def _copy_pieces(sources: torch.Tensor, targets: torch.Tensor, piece: int) -> None:
    """Copies pieces from mapped host memory with a Triton kernel: each of up to 12 programs copies
    whole pieces, one after another, in chunks of up to 8 KiB. vLLM 0.32 copies from host to GPU in
    this way if there are at least 16 pieces, each below 28 KiB.
    """
    # Imported here, because Triton may be missing on a machine without a GPU.
    from benches.gpu_cells.triton_copy import copy_pieces

    copy_pieces[(min(PROGRAMS, len(sources)),)](
        sources.to("cuda", non_blocking=True),
        targets.to("cuda", non_blocking=True),
        piece // 8,
        len(sources),
        chunk=1024,
    )


def interference(rig: Rig) -> Rows:
    """Returns, for each way and direction of moves, the time of a matrix product alone, the time
    of a product during moves as a multiple of the time alone, and the rate of the moves. Returns no
    rows if the device is emulated.
    """
    if rig.emulated:
        return []
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def products() -> float:
        rig.finish()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(PRODUCTS):
            a @ b
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / PRODUCTS

    shape = rig.shapes[2]
    memory = rig.memory(shape, 2 * PAGES)
    slots = rig.slots(shape.page, PAGES)
    products()
    alone = min(products() for _ in range(3))
    rows: Rows = []
    for way in WAYS:
        pages = rig.pool(memory, way).pages(range(PAGES))
        for direction, submit in (("scatter", pages.scatter), ("gather", pages.gather)):
            with timed() as times:
                moves = [submit(slots) for _ in range(BESIDE)]
                beside = products()
                if not all(move.wait() for move in moves):
                    raise AssertionError(f"a {direction} by {way} did not end")
            rows.append(
                {
                    "way": way,
                    "direction": direction,
                    "product_ms": alone,
                    "slowdown": beside / alone,
                    "move_gb_s": BESIDE * PAGES * shape.page / times.wall / 1e9,
                }
            )
    return rows
