#!/usr/bin/env bash
# tools/setup.sh serving|everything: an environment in .venv with what `make serve` or `make test` needs.
# Does nothing when it is up to date. One that is too old, broken or of another folder is made anew.
set -euo pipefail
cd "$(dirname "$0")/.."

wanted=$1
venv=.venv
python=${PYTHON:-python3}
stamp=$venv/.installed

recipe() { cat pyproject.toml requirements/*.txt | cksum; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

belongs_here() { [ ! -f "$stamp" ] || grep -qxF "$PWD" "$stamp"; } # its scripts name the folder they were made in

step() {
    printf '[%s] %s ... ' "$1" "$2"
    shift 2
    local start=$SECONDS
    "$@"
    printf '%s s\n' $((SECONDS - start))
}

pip_install() {
    "$venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check "$@"
}

if [ -e "$venv" ] && ! { is_new_enough "$venv/bin/python" && belongs_here; }; then
    echo "saccade: $venv is broken, of another folder or older than Python 3.11; it is made anew."
    rm -rf "$venv"
fi
if [ -f "$stamp" ] && grep -qxF "$(recipe)" "$stamp" && grep -qxE "everything|$wanted" "$stamp"; then
    exit 0
fi
if [ ! -e "$venv" ] && ! is_new_enough "$python"; then
    echo "saccade: Python 3.11 or newer is needed, and $python is $("$python" --version 2>&1 || true)." \
        "Name another: make serve PYTHON=python3.12" >&2
    exit 1
fi

echo "saccade: installing for ${wanted/everything/tests and serving} into $venv; once, a minute or more."
[ -e "$venv" ] || step 1/4 "an environment of $("$python" --version)" "$python" -m venv "$venv"
step 2/4 "packages of known hashes" pip_install --require-hashes --only-binary :all: --no-deps \
    --requirement "requirements/$wanted.txt"
step 3/4 "PyTorch, the largest part" pip_install --requirement requirements/torch.txt
step 4/4 "Saccade itself" pip_install --no-deps --no-build-isolation --editable .
printf '%s\n' "$PWD" "$(recipe)" "$wanted" >"$stamp"
