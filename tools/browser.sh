#!/usr/bin/env bash
# The page's tests need a real Chromium: finds one, else installs Debian's package, else says what to install.
set -euo pipefail
. "$(dirname "$0")/debian.sh"

have chromium chromium-browser google-chrome google-chrome-stable || debian_install chromium fonts-dejavu-core || {
    echo "The page's tests need a browser: install chromium (Debian: apt-get install chromium fonts-dejavu-core) and run again." >&2
    exit 1
}
