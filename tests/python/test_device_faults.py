"""A worker of vLLM over a CUDA driver with faults: the worker reports failed loads, keeps its store
in use, and delivers no wrong byte.

The driver is the fake library of `crates/device/tests/fake`, which dlopen finds in place of CUDA's.
Each program runs in a separate process, because a process loads a driver only once, and a driver's
errors last until the process ends.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "crates/device/tests/fake/libcuda.cpp"
HERE = str(Path(__file__).parent)

# Defines `make`: a worker of one KV cache group over the array `memory`, with a store at `path`.
MAKER = """
import ctypes, logging, os, sys, time
import numpy as np
import ritornello as rt
from ritornello.vllm.handshake import ShardFacts
from ritornello.vllm.kv_memory import DeviceMemory
from ritornello.vllm.metadata import Load, PageBlocks, Save, StepMetadata
from ritornello.vllm.meter import StepMeter
from ritornello.vllm.settings import Settings
from ritornello.vllm.store import VllmStore
from ritornello.vllm.worker import WorkerSide
from support import keys_of, pages_of
from vllm_shapes import Tensor, cache_group, identity

logging.basicConfig(stream=sys.stdout, format="%(message)s")
LAYERS, BLOCKS, PIECE = ("l.0", "l.1"), 8, 1024
PAGE = len(LAYERS) * PIECE

class Stream:
    value = ctypes.c_int()
    handle = ctypes.addressof(value)

class FakeDevice(DeviceMemory):
    def stream(self):
        return Stream.handle

    def _ordinal(self):
        return 0

class Cache(Tensor):
    def __init__(self, array):
        super().__init__(array)
        self.device = "cuda"

def make(memory, path):
    array = memory.reshape(len(LAYERS), BLOCKS, 2, 64, 8)
    caches = {name: Cache(array[n]) for n, name in enumerate(LAYERS)}
    meter = StepMeter()
    store = VllmStore(Settings(path, capacity="1GiB"), meter)
    device = FakeDevice(1, lambda _: "FAKE")
    made = WorkerSide(store, BLOCKS, [(list(LAYERS), 2)], meter, memory=device)
    return array, caches, store, made
"""
# A worker over memory of the fake device, with a store at sys.argv[1].
WORKER = (
    MAKER
    + """
fake = ctypes.CDLL("libcuda.so.1")
fake.fake_break.argtypes = [ctypes.c_char_p]

def device_memory(nbytes):
    context, address = ctypes.c_void_p(), ctypes.c_uint64()
    assert fake.cuDevicePrimaryCtxRetain(ctypes.byref(context), 7) == 0
    assert fake.cuCtxPushCurrent_v2(context) == 0
    assert fake.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes)) == 0
    memory = (ctypes.c_uint8 * nbytes).from_address(address.value)
    return np.ctypeslib.as_array(memory)

array, caches, store, made = make(device_memory(BLOCKS * PAGE), sys.argv[1])
"""
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda")
    library = path / "libcuda.so.1"
    compiler = os.environ.get("CXX", "g++")
    options = ["-shared", "-fPIC", "-O1", "-std=c++17", "-Wno-unknown-pragmas"]
    subprocess.run([compiler, *options, "-o", library, SOURCE], check=True)
    return path


def run(folder: Path, program: str, *words: str | Path) -> str:
    libraries = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    environment = os.environ | {
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "PYTHONPATH": os.pathsep.join([HERE, *filter(None, sys.path)]),
    }
    command = [sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


REFUSED = """
fake.fake_break(sys.argv[2].encode())
made.register(caches)
print(made.facts().unsupported_reason)
made.load(StepMetadata(identity(cache_group(head_bytes=512)), [
    Load("a", [PageBlocks(0, 0, keys_of("a", 2), (1, 2))], asynchronous=True)
]))
print(made.take_completed_loads(), made.results.take_failed_blocks())
made.close()
"""


@pytest.mark.parametrize(
    ("part", "advice"),
    [
        ("OLD", "install driver release 550"),
        ("NO_DEVICE", "has no device"),
        ("NO_MAPPING", "cannot map host memory"),
        ("NO_PINNING", "ulimit -l"),
    ],
)
def test_engine_runs_without_a_device_that_cannot_be_opened(
    folder: Path, tmp_path: Path, part: str, advice: str
) -> None:
    said = run(folder, WORKER + REFUSED, tmp_path / "kv", part)
    assert "the KV memory cannot be used" in said
    assert advice in said
    assert "({'a'}, {'a'}) {1, 2}" in said


# After one load the device fails at its next move, the first move of load "b". This load, the save
# of its step, and all later loads and saves fail; the store stays in use.
FAILS = """
made.register(caches)
assert made.facts().groups, made.facts()
work = identity(cache_group(head_bytes=512))
keys = keys_of("a", 4)
content = pages_of(keys, PAGE)
for block in range(4):
    array[:, 1 + block] = content[block].reshape(len(LAYERS), 2, 64, 8)

def step(metadata=StepMetadata(), seconds=30):
    made.begin_step(metadata)
    made.load(metadata)
    made.save(metadata)
    found = made.take_completed_loads()
    end = time.monotonic() + seconds
    while (made._async_loads or made._pending_saves) and time.monotonic() < end:
        time.sleep(0.005)
        made.save(StepMetadata())
        more = made.take_completed_loads()
        found = found[0] | more[0], found[1] | more[1]
    assert not made._async_loads and not made._pending_saves, "a load or save has not ended"
    return found, made.results.take_failed_blocks(), made.results.take_report()

def loading(name, blocks):
    return [Load(name, [PageBlocks(0, 0, keys, blocks)], asynchronous=True)]

def saving(name, first):
    return [Save(name, PageBlocks(0, 0, keys_of(name, 1), (first,)))]

step(StepMetadata(work, (), [Save("a", PageBlocks(0, 0, keys, (1, 2, 3, 4)))]))
array[:, 1:5] = 0
found, blocks, report = step(StepMetadata(None, loading("a", (1, 2, 3, 4))))
assert (found, blocks) == (({"a"}, set()), set()), (found, blocks)
assert list(report.load_seconds) == ["a"] and not report.unsupported_reason, report
for block in range(4):
    assert (array[:, 1 + block].reshape(-1) == content[block]).all(), "the load has wrong bytes"

core = store._store
fake.fake_fail_after(0)
found, blocks, report = step(StepMetadata(None, loading("b", (1, 2, 3, 4)), saving("c", 5)))
assert (found, blocks) == (({"b"}, {"b"}), {1, 2, 3, 4}), (found, blocks)
assert made._shard.kv_memory.problem()
found, blocks, later = step(StepMetadata(None, loading("d", (5, 6, 7, 0)), saving("e", 5)))
assert (found, blocks) == (({"d"}, {"d"}), {5, 6, 7, 0}), (found, blocks)
reason = report.unsupported_reason or later.unsupported_reason
assert "restart the engine" in reason, "the worker must report the failed device"
assert store._store is core and not store.broken, f"the store must stay in use: {store.broken}"
out = np.zeros((4, PAGE), np.uint8)
(scope,) = store._scopes.values()
assert core.get_batch(scope, keys, out) == 4
assert (out == content).all()
assert core.probe(scope, keys_of("c", 1)) == 0, "a page was stored that was not read"
made.close()
print("done")
"""


FREED = """
made.register(caches)
assert fake.cuMemFree_v2(ctypes.c_uint64(array.ctypes.data)) == 0
made.load(StepMetadata(identity(cache_group(head_bytes=512)), [
    Load("a", [PageBlocks(0, 0, keys_of("a", 2), (1, 2))], asynchronous=True)
]))
print(made.results.take_report().unsupported_reason)
assert made.take_completed_loads() == ({"a"}, {"a"})
assert not store.broken, store.broken
made.close()
"""


def test_memory_that_is_not_allocated_is_not_used(folder: Path, tmp_path: Path) -> None:
    said = run(folder, WORKER + FREED, tmp_path / "kv")
    assert "the memory of a pool is not allocated on the device" in said


def test_device_that_fails_in_a_load_stops_loads_and_saves_only(
    folder: Path, tmp_path: Path
) -> None:
    assert "done" in run(folder, WORKER + FAILS, tmp_path / "kv").splitlines()


# Opens a device with an empty library as the driver, and prints the functions that the error names
# as missing: all that the core requires of a driver.
LACKING = """
import ritornello as rt
try:
    rt.Device.open()
except rt.errors.InvalidError as error:
    print(str(error).partition("missing=")[2].rstrip("]"))
"""
# For each function in sys.argv[2:], a forked child loads the driver without this function. The
# child's engine runs without hits, and its process can use a store.
MISSING = """
path, names = sys.argv[1], sys.argv[2:]
library = os.environ["LD_LIBRARY_PATH"].split(os.pathsep)[0] + "/libcuda.so.1"
with open(library, "rb") as file:
    whole = file.read()

def run_without(name):
    array, caches, store, made = make(np.zeros(BLOCKS * PAGE, np.uint8), f"{path}/{name}")
    made.register(caches)
    reason = made.facts().unsupported_reason
    assert f"[missing={name}]" in reason and "install driver release 550" in reason, reason
    made.load(StepMetadata(identity(cache_group(head_bytes=512)), [
        Load("a", [PageBlocks(0, 0, keys_of("a", 2), (1, 2))], asynchronous=True)
    ]))
    assert made.take_completed_loads() == ({"a"}, {"a"})
    assert made.results.take_failed_blocks() == {1, 2}
    scope, keys = rt.Scope.opaque("other", PAGE), keys_of("b", 2)
    content = pages_of(keys, PAGE)
    assert store._store.put_batch(scope, keys, content) == 2
    out = np.zeros((2, PAGE), np.uint8)
    assert store._store.get_batch(scope, keys, out) == 2 and (out == content).all()
    made.close()

for name in names:
    stored = f"\\0{name}\\0".encode()
    assert stored in whole, name
    with open(library + ".new", "wb") as file:
        file.write(whole.replace(stored, b"\\0_" + stored[2:]))
    os.replace(library + ".new", library)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run_without(name)
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, name
print("done")
"""


def test_engine_runs_if_driver_lacks_one_required_function(folder: Path, tmp_path: Path) -> None:
    for name in ("empty", "whole"):
        (tmp_path / name).mkdir()
    empty, whole = tmp_path / "empty/libcuda.so.1", tmp_path / "whole/libcuda.so.1"
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, "-shared", "-x", "c++", os.devnull, "-o", empty], check=True)
    shutil.copy(folder / "libcuda.so.1", whole)
    names = run(empty.parent, LACKING).split()
    assert len(names) >= 30
    assert {"cuInit", "cuLaunchKernel", "cuMemcpyAsync"} <= set(names)
    said = run(whole.parent, MAKER + MISSING, tmp_path / "kv", *names)
    assert "done" in said.splitlines()
