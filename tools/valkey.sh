#!/usr/bin/env bash
# The tests of --embedding-store need a real server: finds one, else installs Debian's package, else says what to install.
set -euo pipefail

for name in valkey-server redis-server; do
    if command -v "$name" >/dev/null; then
        exit 0
    fi
done

tell() {
    echo "The tests of --embedding-store need a server: install valkey-server or redis-server (apt-get install redis-server) and run again." >&2
    exit 1
}

command -v apt-get >/dev/null || tell
if [ "$(id -u)" -eq 0 ]; then
    as_root=()
else
    as_root=(sudo -n)
fi
install() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$1"; }
either() { install valkey-server || install redis-server; }
{ either || { "${as_root[@]}" apt-get update && either; }; } >&2 || tell
