#!/usr/bin/env bash
# Downloads the Python sources of a vLLM release, for tests that read its interface:
#
#   engines/vllm/sources.sh 0.33.0        into build/env/vllm-0.33.0-sources (a 340 MB download)
#
# The sources are parsed, and never imported or run, so the release need not be installable.
set -euo pipefail

version=${1:?usage: $0 VERSION}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
target=$root/build/env/vllm-$version-sources
[[ -f $target/.stamp ]] && exit 0

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --dest "$work" "vllm==$version"
rm -rf "$target"
mkdir -p "$target"
python3 - "$work"/vllm-*.whl "$target" <<'PYTHON'
import sys
import zipfile

wheel, target = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(target, [name for name in archive.namelist() if name.endswith(".py")])
PYTHON
touch "$target/.stamp"
