#!/usr/bin/env bash
# The environment of LMCache: build/env/lmcache (Python 3.11, lmcache and a torch without CUDA, 1.6 GB).
#
#   engines/lmcache/build.sh                  build it, or do nothing if its inputs have not changed
#   engines/lmcache/build.sh --wheel PATH     then (re)install this ritornello wheel into it
#
# Needs python3.11 with venv, gcc and readelf. uv comes into its own environment, build/env/uv.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
envs=$root/build/env
target=$envs/lmcache
uv=$envs/uv/bin/uv
stubs=$root/engines/vllm/make_cuda_stubs.py
wheel=

while (($#)); do
    case $1 in
        --wheel) wheel=${2:?--wheel needs a path}; shift 2 ;;
        *) echo "usage: $0 [--wheel PATH]" >&2; exit 2 ;;
    esac
done

# One builder at a time: `make test-lmcache` and `make demo-lmcache` may run side by side.
mkdir -p "$envs"
exec 9>"$envs/.lmcache.lock"
flock 9

if [[ ! -x $uv ]]; then
    python3 -m venv "$envs/uv"
    "$envs/uv/bin/python" -m pip install --quiet --disable-pip-version-check 'uv>=0.9,<1'
fi

stamp=$(cat "$here"/{build.sh,constraints.txt,overrides.txt,requirements.txt} "$stubs" | sha256sum)
if [[ $(cat "$target/.stamp" 2>/dev/null) != "$stamp" ]]; then
    echo "lmcache environment: building $target (1.6 GB, under a minute with a warm package cache)"
    rm -rf "$target"
    "$uv" venv --quiet --python 3.11 "$target"
    "$uv" pip install --quiet --python "$target/bin/python" \
        --overrides "$here/overrides.txt" --constraints "$here/constraints.txt" \
        --requirements "$here/requirements.txt"
    site=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$target/bin/python" "$stubs" "$site" >"$target/stubs.log"
    "$target/bin/python" -c 'import lmcache; assert lmcache.__version__ == "0.5.6", lmcache.__version__' 2>/dev/null
    echo "$stamp" >"$target/.stamp"
fi

if [[ -n $wheel ]]; then
    "$uv" pip install --quiet --python "$target/bin/python" --no-deps --reinstall "$wheel"
fi
