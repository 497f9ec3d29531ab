#!/usr/bin/env bash
# Builds the environment of LMCache: build/env/lmcache (Python 3.11, lmcache and torch without CUDA,
# 1.6 GB).
#
#   engines/lmcache/build.sh                  builds it, unless its inputs are unchanged
#   engines/lmcache/build.sh --wheel PATH     then installs this ritornello wheel into it
#
# Needs python3 with venv, gcc and readelf. uv, which is installed into a separate environment,
# build/env/uv, downloads Python 3.11 if the machine has none.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"

if changed; then
    create "1.6 GB, under a minute with a warm package cache"
    stub_cuda
    "$target/bin/python" -c 'import lmcache; assert lmcache.__version__ == "0.5.6", lmcache.__version__' 2>/dev/null
    finish
fi

install_wheel
