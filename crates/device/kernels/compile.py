#!/usr/bin/env python3
"""Compiles `kv.cu` to `kv.ptx` with NVRTC 12.4, which is a wheel on PyPI and needs no GPU.

    pip install --no-deps nvidia-cuda-nvrtc-cu12==12.4.127
    python3 crates/device/kernels/compile.py           # writes kv.ptx
    python3 crates/device/kernels/compile.py --check   # fails if kv.ptx differs

The exit status is 3 if NVRTC is not installed. The version of NVRTC decides which drivers accept
the PTX: NVRTC 12.4 writes PTX ISA 8.4, which needs a driver of release 550 or later.
"""

import argparse
import ctypes
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
VERSION = (12, 4)
OPTIONS = ("--gpu-architecture=compute_80", "--std=c++17")
MISSING = 3

Call = Callable[..., int]


def library() -> ctypes.CDLL | None:
    """Loads NVRTC from the wheel in this environment; `None` if the wheel is not installed."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder) / "cuda_nvrtc" / "lib" / "libnvrtc.so.12"
        if path.exists():
            # NVRTC finds its builtins only if they are loaded already, or on the library path.
            ctypes.CDLL(str(path.parent / "libnvrtc-builtins.so.12.4"), ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(path))
    return None


def compiled(nvrtc: ctypes.CDLL, source: bytes) -> str:
    """Compiles `source` to PTX. Exits with a message if the version of NVRTC is not `VERSION`,
    or if NVRTC fails or prints messages.
    """
    version = (ctypes.c_int(), ctypes.c_int())
    nvrtc.nvrtcVersion(*(ctypes.byref(part) for part in version))
    found = tuple(part.value for part in version)
    if found != VERSION:
        sys.exit(
            f"NVRTC {found[0]}.{found[1]} is installed: install {VERSION[0]}.{VERSION[1]} instead"
        )
    program = ctypes.c_void_p()
    options = (ctypes.c_char_p * len(OPTIONS))(*(option.encode() for option in OPTIONS))
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kv.cu", 0, None, None)
    status = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options)
    messages = text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    if status or messages:
        sys.exit(f"NVRTC returned {status}:\n{messages}")
    ptx = text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx


def text(size: Call, read: Call, program: ctypes.c_void_p) -> str:
    """Returns a text of the program: `size` returns its length, `read` its bytes."""
    length = ctypes.c_size_t()
    size(program, ctypes.byref(length))
    buffer = ctypes.create_string_buffer(length.value)
    read(program, buffer)
    return buffer.value.decode().strip("\n\0")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only check that kv.ptx is current")
    given = parser.parse_args()
    nvrtc = library()
    if nvrtc is None:
        print("NVRTC is not installed: pip install --no-deps nvidia-cuda-nvrtc-cu12==12.4.127")
        return MISSING
    ptx = compiled(nvrtc, (HERE / "kv.cu").read_bytes()) + "\n"
    path = HERE / "kv.ptx"
    if not given.check:
        path.write_text(ptx)
    elif not path.exists() or path.read_text() != ptx:
        sys.exit("kv.ptx is not the compiled kv.cu: run crates/device/kernels/compile.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
