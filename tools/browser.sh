#!/usr/bin/env bash
# The page's tests need a real Chromium: finds one, else installs Debian's package, else says what to install.
set -euo pipefail

for name in chromium chromium-browser google-chrome google-chrome-stable; do
    if command -v "$name" >/dev/null; then
        exit 0
    fi
done

tell() {
    echo "The page's tests need a browser: install chromium (Debian: apt-get install chromium fonts-dejavu-core) and run again." >&2
    exit 1
}

command -v apt-get >/dev/null || tell
if [ "$(id -u)" -eq 0 ]; then
    as_root=()
else
    as_root=(sudo -n)
fi
packages=(chromium fonts-dejavu-core)
install() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${packages[@]}"; }
{ install || { "${as_root[@]}" apt-get update && install; }; } >&2 || tell
