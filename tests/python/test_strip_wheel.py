"""`packaging/strip_wheel.py` strips the extension module of a wheel, and writes the symbols of the
module to a separate file.
"""

import base64
import ctypes
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "packaging/strip_wheel.py"


def sections(file: Path) -> str:
    return subprocess.run(
        ["readelf", "--sections", "--wide", file], capture_output=True, text=True, check=True
    ).stdout


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def test_wheel_is_stripped_and_its_symbols_kept(tmp_path: Path) -> None:
    module, source = tmp_path / "_core.abi3.so", tmp_path / "core.c"
    source.write_text(
        "static int half(int n) { return n / 2; } int answer(void) { return half(84); }"
    )
    subprocess.run(["gcc", "-g", "-O0", "-shared", "-fPIC", source, "-o", module], check=True)
    other = b"x = 1\n"
    wheel, symbols = tmp_path / "p-1-py3-none-any.whl", tmp_path / "symbols"
    record = (
        f"p/_core.abi3.so,sha256={digest(module.read_bytes())},1\np/x.py,sha256=x,6\nRECORD,,\n"
    )
    with zipfile.ZipFile(wheel, "w") as out:
        out.write(module, "p/_core.abi3.so")
        out.writestr("p/x.py", other)
        out.writestr("p-1.dist-info/RECORD", record)

    subprocess.run([sys.executable, SCRIPT, wheel, symbols], check=True)

    with zipfile.ZipFile(wheel) as stripped:
        names = stripped.namelist()
        assert names == ["p/_core.abi3.so", "p/x.py", "p-1.dist-info/RECORD"]
        data = stripped.read(names[0])
        assert stripped.read("p/x.py") == other
        record = stripped.read(names[2]).decode()
    assert record.splitlines() == [
        f"p/_core.abi3.so,sha256={digest(data)},{len(data)}",
        "p/x.py,sha256=x,6",
        "RECORD,,",
    ]
    kept = tmp_path / "stripped.so"
    kept.write_bytes(data)
    assert ctypes.CDLL(str(kept)).answer() == 42
    assert ".gnu_debuglink" in sections(kept)
    assert ".symtab" not in sections(kept) and ".debug_info" not in sections(kept)
    symbols_of = sections(symbols / "_core.abi3.so.debug")
    assert ".symtab" in symbols_of and ".debug_info" in symbols_of
