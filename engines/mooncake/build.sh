#!/usr/bin/env bash
# The environment of Mooncake: build/env/mooncake (Python 3.11, its store and master without CUDA, 0.35 GB).
#
#   engines/mooncake/build.sh                  build it, or do nothing if its inputs have not changed
#   engines/mooncake/build.sh --wheel PATH     then (re)install this ritornello wheel into it
#
# Needs python3.11 with venv. The library libibverbs.so.1, without which Mooncake does not start, comes from
# the system, or else from Debian's packages, which are unpacked into the environment.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
target=$root/build/env/mooncake
wheel=

while (($#)); do
    case $1 in
        --wheel) wheel=${2:?--wheel needs a path}; shift 2 ;;
        *) echo "usage: $0 [--wheel PATH]" >&2; exit 2 ;;
    esac
done

# One builder at a time.
mkdir -p "$root/build/env"
exec 9>"$root/build/env/.mooncake.lock"
flock 9

stamp=$(sha256sum <"${BASH_SOURCE[0]}")
if [[ $(cat "$target/.stamp" 2>/dev/null) != "$stamp" ]]; then
    echo "mooncake environment: building $target (under a minute)"
    rm -rf "$target"
    python3.11 -m venv "$target"
    "$target/bin/python" -m pip install --quiet --no-deps \
        mooncake-transfer-engine-non-cuda==0.3.13.post1 numpy==2.4.6 \
        pytest==9.2.0 pytest-timeout==2.4.0 iniconfig==2.3.1 packaging==26.3 pluggy==1.7.0 Pygments==2.21.0
    if ! "$target/bin/python" -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null; then
        mkdir "$target/debian"
        cd "$target/debian"
        fetch() { apt-get -qq download libibverbs1 libnl-3-200 libnl-route-3-200; }
        fetch 2>/dev/null || { apt-get -qq update && fetch; } || echo "mooncake: no libibverbs.so.1 to be had" >&2
        for package in *.deb; do
            [[ ! -e $package ]] || dpkg-deb --extract "$package" .
        done
        cd "$root"
    fi
    echo "$stamp" >"$target/.stamp"
fi

if [[ -n $wheel ]]; then
    "$target/bin/python" -m pip install --quiet --no-deps --force-reinstall "$wheel"
fi
