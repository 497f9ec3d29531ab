# Builds the environment of an engine, build/env/ENGINE. Sourced by engines/ENGINE/build.sh, for
# which it defines the functions below, and
#
#   here     the folder engines/ENGINE
#   root     the repository
#   target   the folder of the environment
#   site     the folder of its packages
#   uv       the program that installs packages, from a separate environment, build/env/uv
#
# shellcheck shell=bash

here=$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)
root=$(cd "$here/../.." && pwd)
engine=${here##*/}
stubs=$root/engines/vllm/make_cuda_stubs.py
envs=$root/build/env
target=$envs/$engine
site=$target/lib/python3.11/site-packages
uv=$envs/uv/bin/uv
wheel=

while (($#)); do
    case $1 in
        --wheel) wheel=${2:?--wheel needs a path}; shift 2 ;;
        *) echo "usage: $0 [--wheel PATH]" >&2; exit 2 ;;
    esac
done

# `make test` and `make demo` may run concurrently. With these locks only one process at a time
# builds uv's environment, and only one process at a time builds the environment of this engine.
mkdir -p "$envs"
exec 8>"$envs/.uv.lock" 9>"$envs/.$engine.lock"
flock 9

flock 8
if [[ ! -x $uv ]]; then
    python3 -m venv "$envs/uv"
    "$envs/uv/bin/python" -m pip install --quiet --disable-pip-version-check 'uv>=0.9,<1'
fi
flock -u 8

stamp=$(cat "$here"/build.sh "$here"/*.txt "${BASH_SOURCE[0]}" "$stubs" | sha256sum)

# Succeeds if the environment must be built, or built again.
changed() {
    [[ $(cat "$target/.stamp" 2>/dev/null) != "$stamp" ]]
}

# Creates the environment and installs requirements.txt. $1: the size or the duration, for a
# message; further arguments are passed to `uv pip install`.
create() {
    local takes=$1 kind
    shift
    echo "$engine environment: building $target ($takes)"
    rm -rf "$target"
    "$uv" venv --quiet --python 3.11 "$target"
    for kind in overrides constraints; do
        [[ ! -e $here/$kind.txt ]] || set -- "$@" "--$kind" "$here/$kind.txt"
    done
    "$uv" pip install --quiet --python "$target/bin/python" --requirements "$here/requirements.txt" "$@"
}

# Adds stubs of the CUDA libraries against which packages are linked.
stub_cuda() {
    "$target/bin/python" "$stubs" "$site" >"$target/stubs.log"
}

# Records that the environment is complete, so that it is not built again until its inputs change.
finish() {
    echo "$stamp" >"$target/.stamp"
}

# Installs the wheel of `--wheel`, if given, in place of an installed wheel.
install_wheel() {
    [[ -z $wheel ]] || "$uv" pip install --quiet --python "$target/bin/python" --no-deps --reinstall "$wheel"
}
