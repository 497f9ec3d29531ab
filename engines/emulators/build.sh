#!/usr/bin/env bash
# Builds emulators of cloud storage for tests: build/emulators/fake-gcs-server and
# build/emulators/node_modules/.bin/azurite-blob.
#
#   engines/emulators/build.sh    builds each emulator, unless its last build was of this version
#
# Needs go 1.26 or later, and npm with node 20 or later, which fetch the sources. Takes two minutes.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
target=$root/build/emulators
gcs=github.com/fsouza/fake-gcs-server@v1.56.1
# The last version that runs on node 20, with its dependencies as they were published on `day`.
azure=azurite@3.35.0
day=2026-11-01

# Concurrent runs wait for each other.
mkdir -p "$target"
exec 9>"$target/.lock"
flock 9

if [[ $(cat "$target/.gcs" 2>/dev/null) != "$gcs" ]]; then
    echo "emulators: building fake-gcs-server from $gcs (a minute or two)"
    GOBIN=$target go install "$gcs"
    echo "$gcs" >"$target/.gcs"
fi
if [[ $(cat "$target/.azure" 2>/dev/null) != "$azure $day" ]]; then
    echo "emulators: fetching $azure (under a minute)"
    rm -rf "$target/node_modules"
    npm install --prefix "$target" --silent --no-save --no-audit --no-fund --ignore-scripts --omit=dev \
        --before="$day" "$azure"
    echo "$azure $day" >"$target/.azure"
fi
