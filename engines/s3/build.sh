#!/usr/bin/env bash
# Builds S3 servers for tests: build/s3/versitygw and build/s3/minio.
#
#   engines/s3/build.sh [versitygw] [minio]    builds the named servers (default: both), unless
#                                              their last build was of this version
#
# Needs go 1.26 or later, which fetches the sources. Each server takes some minutes.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
target=$root/build/s3
declare -A sources=(
    [versitygw]=github.com/versity/versitygw/cmd/versitygw@v1.8.0
    [minio]=github.com/minio/minio@v0.0.0-20260212201848-7aac2a2c5b7c
)

# Concurrent runs wait for each other.
mkdir -p "$target"
exec 9>"$target/.lock"
flock 9

if (($# == 0)); then
    set -- versitygw minio
fi
for server in "$@"; do
    source=${sources[$server]:?no such server: versitygw or minio}
    if [[ -x $target/$server && $(cat "$target/.$server" 2>/dev/null) == "$source" ]]; then
        continue
    fi
    echo "s3: building $target/$server from $source (minutes)"
    GOBIN=$target go install "$source"
    echo "$source" > "$target/.$server"
done
