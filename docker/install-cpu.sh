#!/bin/sh
# Install vLLM's CPU build and matplotlib from their locks, and this package, into a new environment.
#   docker/install-cpu.sh PREFIX
# pip needs an index with torch's CPU build (see README.md, Try it).
set -eu
prefix=${1:?usage: install-cpu.sh PREFIX, e.g. /opt/kvcompress}
source=$(cd "$(dirname "$0")/.." && pwd)

python3.11 -m venv "$prefix"
install() {
    "$prefix/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$@"
}
install --require-hashes \
    --requirement "$source/requirements/cpu.lock" --requirement "$source/requirements/pictures.lock"
install --no-build-isolation "$source/packaging/vllm-metadata"
install --no-build-isolation "$source"
"$prefix/bin/python" "$source/docker/verify.py" cpu
