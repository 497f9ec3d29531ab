#!/usr/bin/env python3
"""Makes stubs of the NVIDIA libraries that the ordinary torch is linked to, for machines without a
GPU.

The package index has torch with CUDA only, and torch cannot be imported if the CUDA libraries to
which it is linked are missing. A stub defines each symbol that torch needs from its library as a
function. Most of these functions return 100 (cudaErrorNoDevice), so that torch loads, finds no
device, and runs on the CPU.

    python3 make_cuda_stubs.py SITE_PACKAGES        # needs gcc and readelf; about two seconds

A second run makes the same stubs again: stubs of an earlier run do not count as existing libraries.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

MARK = "ritornello_cuda_stub_"

# A pattern of the names of each library's symbols. The pattern decides which library defines a
# symbol if the version of the symbol does not name the library.
SYMBOLS = {
    "cudart": r"^(cuda[A-Z]|__cuda)",
    "cublas": r"^cublas(?!Lt)",
    "cublasLt": r"^cublasLt",
    "cudnn": r"^cudnn",
    "cufft": r"^cufft",
    "curand": r"^curand",
    "cusolver": r"^cusolver",
    "cusparse": r"^cusparse(?!Lt)",
    "cusparseLt": r"^cusparseLt",
    "nccl": r"^(nccl|pnccl)",
    "nvrtc": r"^nvrtc",
    "cufile": r"^cuFile",
    "cupti": r"^cupti",
    "nvshmem_host": r"^nvshmem",
    "nvJitLink": r"^(__)?nvJitLink",
    "nvToolsExt": r"^nvtx",
    "cuda": r"^cu(?!File)[A-Z]",
}
SONAME = re.compile(rf"^lib({'|'.join(SYMBOLS)})\.so")

# Functions that do not only return 100, because they set an output parameter, or because their
# result is a version instead of a status.
BODIES = {
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int *n) { if (n) *n = 0; return 100; }",
    "cudaGetDevice": "int cudaGetDevice(int *n) { if (n) *n = -1; return 100; }",
    "cudaDriverGetVersion": "int cudaDriverGetVersion(int *n) { if (n) *n = 0; return 0; }",
    "cudaRuntimeGetVersion": "int cudaRuntimeGetVersion(int *n) { if (n) *n = 0; return 0; }",
    "cudnnGetVersion": "unsigned long cudnnGetVersion(void) { return 0; }",
    "cudnnGetCudartVersion": "unsigned long cudnnGetCudartVersion(void) { return 0; }",
    "cusparseLtGetVersion": "unsigned long cusparseLtGetVersion(void) { return 0; }",
    "cublasLtGetVersion": "unsigned long cublasLtGetVersion(void) { return 0; }",
}


@dataclass
class Survey:
    """Missing libraries, undefined symbols with their versions, and defined symbols, of a set of
    shared objects.
    """

    libraries: set[str] = field(default_factory=set)
    undefined: set[tuple[str, str]] = field(default_factory=set)
    defined: set[str] = field(default_factory=set)


def is_stub(path: Path) -> bool:
    """Returns whether an earlier run made this file: stubs are small, and define a symbol that
    begins with `MARK`.
    """
    return path.stat().st_size < 1 << 20 and MARK.encode() in path.read_bytes()


def readelf(*arguments: str | Path) -> str:
    done = subprocess.run(["readelf", "-W", *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def survey(objects: list[Path]) -> Survey:
    found = Survey()
    present = {path.name for path in objects}
    for path in objects:
        for name in re.findall(r"NEEDED.*\[(.+?)\]", readelf("-d", path)):
            if SONAME.match(name) and name not in present:
                found.libraries.add(name)
        for line in readelf("--dyn-syms", path).splitlines():
            columns = line.split()
            if len(columns) < 8:
                continue
            name, _, version = columns[7].partition("@")
            if columns[6] != "UND":
                found.defined.add(name)
            elif columns[4] == "GLOBAL":
                found.undefined.add((name, version.strip("@")))
    return found


def belongs(name: str, version: str, library: str, short: str) -> bool:
    """Returns whether `library` would have to define this undefined symbol."""
    if version == library or version.startswith(f"lib{short}.so"):
        return True
    if short == "nvJitLink" and version.startswith("NVJITLINK"):
        return True
    return re.match(SYMBOLS[short], name) is not None and not version.startswith("GLIBC")


def body(name: str) -> str:
    if name in BODIES:
        return BODIES[name]
    if "GetErrorString" in name or "GetErrorName" in name:
        return f'const char *{name}(int e) {{ return "no CUDA device (stub library)"; }}'
    if name.startswith("__cudaRegister"):
        return f"static void *h_{name}; void *{name}(void) {{ return &h_{name}; }}"
    if name.startswith("__cuda"):
        return f"int {name}(void) {{ return 0; }}"
    return f"int {name}(void) {{ return 100; }}"


def build(library: str, versions: dict[str, set[str]], target: Path) -> None:
    match = SONAME.match(library)
    assert match is not None
    names = sorted({name for group in versions.values() for name in group})
    code = "\n".join([*map(body, names), f"int {MARK}{match.group(1)};", ""])
    script = "".join(
        f"{version} {{ global: {'; '.join(sorted(group))}; }};\n"
        for version, group in sorted(versions.items())
        if version
    )
    with tempfile.TemporaryDirectory() as folder:
        source, map_file = Path(folder, "stub.c"), Path(folder, "stub.map")
        source.write_text(code)
        map_file.write_text(script)
        command = [os.environ.get("CC", "gcc"), "-w", "-O1", "-shared", "-fPIC"]
        command += ["-o", str(target), str(source), f"-Wl,-soname,{library}"]
        if script:
            command.append(f"-Wl,--version-script,{map_file}")
        subprocess.run(command, check=True)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    # Each library of torch has $ORIGIN in its run path, so the loader finds stubs in this folder.
    folder = Path(arguments[0]).resolve() / "torch" / "lib"
    objects = [path for path in sorted(folder.glob("*.so*")) if not is_stub(path)]
    found = survey(objects)
    for library in sorted(found.libraries):
        match = SONAME.match(library)
        assert match is not None
        versions: defaultdict[str, set[str]] = defaultdict(set)
        for name, version in found.undefined:
            if name not in found.defined and belongs(name, version, library, match.group(1)):
                versions[version].add(name)
        build(library, versions, folder / library)
        print(f"{library}: {sum(map(len, versions.values()))} symbols")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
