#!/usr/bin/env bash
# The environment of LMCache: build/env/lmcache (Python 3.11, lmcache and a torch without CUDA, 1.6 GB).
#
#   engines/lmcache/build.sh                  build it, or do nothing if its inputs have not changed
#   engines/lmcache/build.sh --wheel PATH     then (re)install this ritornello wheel into it
#
# Needs python3.11 with venv, gcc and readelf. uv comes into its own environment, build/env/uv.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"

if changed; then
    create "1.6 GB, under a minute with a warm package cache"
    stub_cuda
    "$target/bin/python" -c 'import lmcache; assert lmcache.__version__ == "0.5.6", lmcache.__version__' 2>/dev/null
    finish
fi

install_wheel
