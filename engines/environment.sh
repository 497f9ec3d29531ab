# The environment of an engine, build/env/ENGINE: sourced by engines/ENGINE/build.sh, which then has
#
#   target   where it is, and `site`, where its packages are
#   uv       what installs them, in an environment of its own, build/env/uv
#
# and the functions below.
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

# One builder of uv's environment and of this one at a time: `make test` and `make demo` may run side
# by side.
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

# Whether it has to be built (again).
changed() {
    [[ $(cat "$target/.stamp" 2>/dev/null) != "$stamp" ]]
}

# Begins it, with the packages that are asked for. $1: what it takes; the rest is for uv.
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

# Puts libraries that do nothing where packages want CUDA's.
stub_cuda() {
    "$target/bin/python" "$stubs" "$site" >"$target/stubs.log"
}

# Ends what `create` began: until its inputs change it is not built again.
finish() {
    echo "$stamp" >"$target/.stamp"
}

# (Re)installs the ritornello wheel, if one was given.
install_wheel() {
    [[ -z $wheel ]] || "$uv" pip install --quiet --python "$target/bin/python" --no-deps --reinstall "$wheel"
}
