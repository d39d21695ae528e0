#!/usr/bin/env bash
# tools/lock.sh [--upgrade | --upgrade-package NAME]: the versions and hashes in requirements/, from pyproject.toml.
# Without an option it keeps the versions that are there, and adds or removes what pyproject.toml does.
set -euo pipefail
cd "$(dirname "$0")/../requirements"

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"${PYTHON:-python3}" -m venv "$tools"
"$tools/bin/pip" install --quiet --disable-pip-version-check uv
grep -o 'triton>=[^"]*' ../pyproject.toml >"$tools/overrides" # not the one of torch for CUDA, which tests on a CPU do not have

# compile LEVEL WITHOUT OPTIONS...: one version for all machines and Pythons, but nothing of what torch brings on a GPU.
compile() {
    local level=$1 without=$2
    shift 2
    cp "$level.txt" "$tools/lock" 2>/dev/null || true # the versions to keep
    "$tools/bin/uv" pip compile ../pyproject.toml torch.txt --output-file "$tools/lock" --quiet --no-config --no-header \
        --universal --python-version 3.11 --fork-strategy fewest --generate-hashes --no-annotate \
        --overrides "$tools/overrides" "$@"
    {
        echo "# What $level needs, with the hashes of all its files, but for torch (torch.txt). Written by \`make lock\`."
        awk -v without="^($without)" '/^[a-z0-9]/ { wanted = $0 !~ without } wanted' "$tools/lock"
    } >"$level.txt"
}

compile everything 'torch==|cuda-|nvidia-' --extra dev "$@"
serving=(--extra video --extra jpeg --extra pdf --extra otel --extra valkey --extra kv-events)
compile serving 'torch==|cuda-|nvidia-|triton==' "${serving[@]}" --constraint everything.txt
