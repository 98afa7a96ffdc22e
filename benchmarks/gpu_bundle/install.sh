#!/bin/sh
# Checks the pieces beside this file, and unpacks them: sh install.sh TARGET
set -e
mkdir -p "$1"
target=$(cd "$1" && pwd)
cd "$(dirname "$0")"
sha256sum --quiet --check SHA256SUMS
for first in *.00; do
    cat "${first%.00}".[0-9]* > "$target/archive.tar.xz"
    python3 -m tarfile --filter data --extract "$target/archive.tar.xz" "$target"
    rm "$target/archive.tar.xz"
done
