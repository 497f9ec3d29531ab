"""A worker over a real store, with arrays as the engine's memory: when `await_layer` returns, the
layer's pages are in memory.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from vllm_shapes import Tensor, cache_group, identity

from ritornello.vllm.cache_store import CacheStore
from ritornello.vllm.metadata import Load, PageBlocks, Save, StepMetadata
from ritornello.vllm.meter import StepMeter
from ritornello.vllm.settings import Settings
from ritornello.vllm.store import VllmStore
from ritornello.vllm.worker import WorkerSide

BLOCKS = 12
LAYERS = [f"l.{number}" for number in range(6)]
# Bytes of one layer of a page. A load delivers layers in groups of at least 128 KiB: two layers of
# this size.
BYTES = 64 << 10
KEYS = tuple(f"page {place:02}".encode() * 4 for place in range(5))
SAVED, LOADED = (1, 2, 3, 4, 5), (11, 9, 8, 7, 6)
IDENTITY = identity(
    cache_group(head_ranges=((0, 1),), stages=(tuple(LAYERS),), kv_heads=1, head_bytes=BYTES)
)


class Machine:
    def __init__(self, store: VllmStore, meter: StepMeter) -> None:
        self.meter = meter
        self.memory = {
            name: numpy.random.default_rng(seed).integers(0, 256, (BLOCKS, BYTES), numpy.uint8)
            for seed, name in enumerate(LAYERS)
        }
        self.right = {name: array[list(SAVED)].copy() for name, array in self.memory.items()}
        self.worker = WorkerSide(store, BLOCKS, [(LAYERS, 1)], meter)
        self.worker.register({name: Tensor(array) for name, array in self.memory.items()})
        # The first step begins to save the pages; each further step checks whether the save is
        # complete.
        self.step(StepMetadata(IDENTITY, (), [Save("a", PageBlocks(0, 0, KEYS, SAVED))]))
        while self.worker._pending_saves:
            self.step(StepMetadata())

    def step(self, metadata: StepMetadata, *, check: bool = False) -> set[int]:
        """Runs one step. With `check`, asserts before each layer runs that its loaded pages have
        the right bytes. Returns the blocks that were not filled.
        """
        self.worker.begin_step()
        self.worker.load(metadata)
        for name in LAYERS:
            self.worker.step_loads.await_layer(name)
            if check:
                assert (self.memory[name][list(LOADED)] == self.right[name]).all(), name
        self.worker.save(metadata)
        return self.worker.results.take_failed_blocks()

    def counts(self) -> dict[str, float]:
        return self.meter.take() or {}


@pytest.fixture(params=["path", "tiers"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machine]:
    meter, place = StepMeter(), str(tmp_path / "disk")
    store: VllmStore
    if request.param == "path":
        store = VllmStore(Settings(place, "1GiB"), meter)
    else:
        tiers = [f"host 64MiB {tmp_path}/host", f"disk {place} 1GiB"]
        store = CacheStore(Settings.parse({"tiers": tiers}), meter)
    made = Machine(store, meter)
    yield made
    made.worker.close()


LOAD = StepMetadata(None, [Load("b", [PageBlocks(0, 0, KEYS, LOADED)])])


def test_awaited_layer_has_its_pages(machine: Machine) -> None:
    machine.counts()
    for _ in range(10):
        for array in machine.memory.values():
            array[list(LOADED)] = 0
        assert machine.step(LOAD, check=True) == set()
    counts = machine.counts()
    assert (counts["layer_loads"], counts["loaded_pages"]) == (10, 50)
    assert counts["loaded_bytes"] == 50 * len(LAYERS) * BYTES


def test_pages_in_listed_directories_are_loaded(tmp_path: Path) -> None:
    listed, meter = [str(tmp_path / name) for name in "ab"], StepMeter()
    settings = Settings.parse({"path": listed, "capacity": "1GiB"})
    machine = Machine(VllmStore(settings, meter), meter)
    assert machine.step(LOAD, check=True) == set()
    assert machine.counts()["loaded_pages"] == 5
    machine.worker.close()
    assert (tmp_path / "a" / "MANIFEST").exists() and (tmp_path / "b" / "VOLUME").exists()


def test_missing_pages_are_reported_after_step(machine: Machine) -> None:
    keys = (*KEYS[:4], b"never stored" * 2)
    assert machine.step(StepMetadata(None, [Load("b", [PageBlocks(0, 0, keys, LOADED)])])) == {6}
    report = machine.worker.results.take_report()
    assert report is not None
    assert report.unsaved == [("b", 0, 4)]


def test_damage_in_last_layers_fails_one_page(machine: Machine, tmp_path: Path) -> None:
    store = machine.worker._store._store
    assert store is not None
    store.flush()
    last = machine.right[LAYERS[-1]][2].tobytes()[-4096:]
    found = 0
    for path in tmp_path.rglob("seg-*"):
        at = path.read_bytes().find(last)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([last[0] ^ 1]))
            found += 1
    assert found
    machine.counts()
    assert machine.step(LOAD) == {8}
    for name in LAYERS[:4]:
        assert (machine.memory[name][list(LOADED)] == machine.right[name]).all()
    assert machine.counts()["failed_pages"] == 1
