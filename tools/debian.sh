# To be sourced. `have NAME ...`: one of these commands is there. `debian_install PACKAGE ...`: as root, or by sudo without a password.
have() {
    local name
    for name in "$@"; do
        if command -v "$name" >/dev/null; then
            return 0
        fi
    done
    return 1
}

debian_install() {
    local as_root=()
    have apt-get || return 1
    if [ "$(id -u)" -ne 0 ]; then
        as_root=(sudo -n)
    fi
    local install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@")
    { "${install[@]}" || { "${as_root[@]}" apt-get update && "${install[@]}"; }; } >&2
}
