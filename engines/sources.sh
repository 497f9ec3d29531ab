#!/usr/bin/env bash
# Downloads the Python sources of a release of an engine, for tests that read its interface:
#
#   engines/sources.sh vllm 0.33.0         into build/env/vllm-0.33.0-sources (47 MB)
#   engines/sources.sh sglang 0.5.22       into build/env/sglang-0.5.22-sources (35 MB)
#   engines/sources.sh lmcache 0.5.5       into build/env/lmcache-0.5.5-sources (9 MB)
#
# Takes the source distribution, which is small, or the wheel of a release that has no source
# distribution. The sources are parsed, and never imported or run, so the release need not be
# installable.
set -euo pipefail

engine=${1:?usage: $0 ENGINE VERSION}
version=${2:?usage: $0 ENGINE VERSION}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=$root/build/env/$engine-$version-sources
[[ -f $target/.stamp ]] && exit 0

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# pip runs the build backend of a source distribution to get its metadata, and an engine's build
# backend needs torch. The module below replaces the build backend: it returns name and version, and
# runs no code of the engine.
mkdir -p "$work/backend/setuptools" "$work/files"
touch "$work/backend/setuptools/__init__.py"
cat >"$work/backend/setuptools/build_meta.py" <<'PYTHON'
from pathlib import Path


def prepare_metadata_for_build_wheel(folder, settings=None):
    headers = dict(line.split(": ", 1) for line in Path("PKG-INFO").open() if ": " in line)
    name, version = headers["Name"].strip(), headers["Version"].strip()
    metadata = Path(folder, f"{name}-{version}.dist-info")
    metadata.mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (metadata / "METADATA").write_text(text)
    return metadata.name
PYTHON

download() {
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work/files" "$@" \
        "$engine==$version"
}

PYTHONPATH=$work/backend download --no-build-isolation --no-binary :all: 2>/dev/null \
    || download --only-binary :all:
rm -rf "$target"
python3 - "$engine" "$work"/files/* "$target" <<'PYTHON'
import sys
import tarfile
import zipfile
from pathlib import Path

engine, archive, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])


def keep(name, read):
    if name.startswith(f"{engine}/") and name.endswith((".py", ".pyi")) and ".." not in name:
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(read())


if archive.suffix == ".whl":
    with zipfile.ZipFile(archive) as files:
        for name in files.namelist():
            keep(name, lambda: files.read(name))
else:
    with tarfile.open(archive) as files:
        for member in files:
            # Drop the archive's first folder, which is named after the release.
            if member.isfile():
                keep(member.name.partition("/")[2], lambda: files.extractfile(member).read())
if not (target / engine / "__init__.py").is_file():
    sys.exit(f"{archive.name} has no sources of {engine}")
PYTHON
touch "$target/.stamp"
