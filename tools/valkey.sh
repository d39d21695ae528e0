#!/usr/bin/env bash
# The tests of --embedding-store need a real server: finds one, else installs Debian's package, else says what to install.
set -euo pipefail
. "$(dirname "$0")/debian.sh"

have valkey-server redis-server || debian_install valkey-server || debian_install redis-server || {
    echo "The tests of --embedding-store need a server: install valkey-server or redis-server (apt-get install redis-server) and run again." >&2
    exit 1
}
