#!/usr/bin/env bash
# Builds the environment of Mooncake: build/env/mooncake (Python 3.11, Mooncake's store and master
# without CUDA, 0.35 GB).
#
#   engines/mooncake/build.sh                  builds it, unless its inputs are unchanged
#   engines/mooncake/build.sh --wheel PATH     then installs this ritornello wheel into it
#
# Needs python3 with venv. Mooncake does not start without the library libibverbs.so.1. If the
# system lacks this library, Debian's packages that contain it are unpacked into the environment.
set -euo pipefail

# shellcheck source=engines/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"

if changed; then
    create "under a minute" --no-deps
    if ! "$target/bin/python" -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null; then
        mkdir "$target/debian"
        cd "$target/debian"
        fetch() { apt-get -qq download libibverbs1 libnl-3-200 libnl-route-3-200; }
        fetch 2>/dev/null || { apt-get -qq update && fetch; } || echo "mooncake: cannot fetch libibverbs.so.1" >&2
        for package in *.deb; do
            [[ ! -e $package ]] || dpkg-deb --extract "$package" .
        done
        cd "$root"
    fi
    finish
fi

install_wheel
