"""Measures puts and gets of pages in the device's memory, with a store in memory and on a disk."""

from benches.gpu_cells.rig import GIB, Rig, Row, Rows, Shape, Times
from benches.gpu_cells.stored import PLACES, StoredPages, opened

ROUNDS = 3
# The two limits of an operation, by their names in `Rig.limits`: the device's link, and the disk of
# the store. For a store in memory, both are the link.
LIMITS = {
    ("memory", "put"): ("from device", "from device"),
    ("memory", "get"): ("to device", "to device"),
    ("disk", "put"): ("from device", "disk write"),
    ("disk", "get"): ("to device", "disk read"),
}


def store(rig: Rig) -> Rows:
    """Returns the rates of one put and of the fastest of `ROUNDS` gets, for three shapes of pages,
    or one shape if the device is emulated. All bytes are compared after each get.
    """
    total = (16 << 20) if rig.emulated else 2 * GIB
    rows: Rows = []
    for shape in rig.shapes[:1] + rig.shapes[2:4]:
        memory = rig.memory(shape, total // shape.page)
        for place in PLACES:
            with opened(rig, place, 2 * total + GIB) as opened_store:
                pages = StoredPages.of(rig, memory, shape.name)
                put = pages.put(opened_store)
                gets = [pages.get(opened_store, memory.blocks) for _ in range(ROUNDS)]
            get = min(gets, key=lambda times: times.wall)
            rows += [
                _row(rig, place, shape, op, pages.nbytes, times)
                for op, times in (("put", put), ("get", get))
            ]
        # Frees the device's memory for the next shape.
        del memory, pages
    return rows


def _row(rig: Rig, place: str, shape: Shape, op: str, nbytes: int, times: Times) -> Row:
    limit = min(LIMITS[place, op], key=rig.limit)
    return {
        "place": place,
        "shape": shape.name,
        "op": op,
        "gb_s": nbytes / times.wall / 1e9,
        "limit": limit,
        "of_limit": nbytes / times.wall / rig.limit(limit),
        "cpu_s_gib": times.cpu / (nbytes / GIB),
    }
