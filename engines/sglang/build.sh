#!/usr/bin/env bash
# The environment of the SGLang engine: build/env/sglang (Python 3.11, 3.2 GB), for machines without a GPU.
#
#   engines/sglang/build.sh                build it, or do nothing if its inputs have not changed
#   engines/sglang/build.sh --wheel PATH   then (re)install this ritornello wheel into it
#
# Needs python3.11 with venv, gcc, g++ and readelf. uv comes into its own environment, build/env/uv.
# `shim` stands in for SGLang's compiled kernels, which want a GPU.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
stubs=$root/engines/vllm/make_cuda_stubs.py
envs=$root/build/env
target=$envs/sglang
uv=$envs/uv/bin/uv
wheel=

while (($#)); do
    case $1 in
        --wheel) wheel=${2:?--wheel needs a path}; shift 2 ;;
        *) echo "usage: $0 [--wheel PATH]" >&2; exit 2 ;;
    esac
done

# One builder of uv's environment and of this one at a time.
mkdir -p "$envs"
exec 8>"$envs/.uv.lock" 9>"$envs/.sglang.lock"
flock 9

flock 8
if [[ ! -x $uv ]]; then
    python3 -m venv "$envs/uv"
    "$envs/uv/bin/python" -m pip install --quiet --disable-pip-version-check 'uv>=0.9,<1'
fi
flock -u 8

stamp=$(cat "$here"/{build.sh,constraints.txt,overrides.txt,requirements.txt} "$stubs" | sha256sum)
if [[ $(cat "$target/.stamp" 2>/dev/null) != "$stamp" ]]; then
    echo "sglang environment: building $target (3.2 GB, a minute or two with a warm package cache)"
    rm -rf "$target"
    "$uv" venv --quiet --python 3.11 "$target"
    "$uv" pip install --quiet --python "$target/bin/python" \
        --overrides "$here/overrides.txt" --constraints "$here/constraints.txt" \
        --requirements "$here/requirements.txt"
    "$uv" pip install --quiet --python "$target/bin/python" --no-deps \
        "$(grep ^triton== "$here/constraints.txt")"
    site=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$target/bin/python" "$stubs" "$site" >"$target/stubs.log"
    "$target/bin/python" -c 'import torch, importlib.metadata as m; assert m.version("sglang") == "0.5.23"'
    echo "$stamp" >"$target/.stamp"
fi

site=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -r "$here/shim/sgl_kernel" "$site/"
if [[ -n $wheel ]]; then
    "$uv" pip install --quiet --python "$target/bin/python" --no-deps --reinstall "$wheel"
fi
