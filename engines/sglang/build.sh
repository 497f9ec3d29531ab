#!/usr/bin/env bash
# Builds the environment of SGLang: build/env/sglang (Python 3.11, 3.2 GB), for machines without a
# GPU.
#
#   engines/sglang/build.sh                builds it, unless its inputs are unchanged
#   engines/sglang/build.sh --wheel PATH   then installs this ritornello wheel into it
#
# Needs python3 with venv, gcc, g++ and readelf. uv, which is installed into a separate environment,
# build/env/uv, downloads Python 3.11 if the machine has none. `shim` replaces SGLang's compiled
# kernels, which need a GPU.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"

if changed; then
    create "3.2 GB, a minute or two with a warm package cache"
    "$uv" pip install --quiet --python "$target/bin/python" --no-deps \
        "$(grep ^triton== "$here/constraints.txt")"
    stub_cuda
    "$target/bin/python" -c 'import torch, importlib.metadata as m; assert m.version("sglang") == "0.5.23"'
    finish
fi

cp -r "$here/shim/sgl_kernel" "$site/"
install_wheel
