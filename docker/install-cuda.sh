#!/bin/sh
# Install this package into the Python environment of an existing vLLM without changing packages there.
# All installed versions are constraints, so pip only adds missing packages, or fails. From matplotlib's
# lock it installs, with hashes, the packages that are not installed in any version.
#   PYTHON=python3 docker/install-cuda.sh
set -eu
python=${PYTHON:-python3}
source=$(cd "$(dirname "$0")/.." && pwd)

installed=$(mktemp)
pictures=$(mktemp)
trap 'rm -f "$installed" "$pictures"' EXIT
"$python" -m pip list --format=freeze --exclude vllm-kvcompress --disable-pip-version-check \
    >"$installed"
"$python" -m pip install --quiet --disable-pip-version-check --no-build-isolation \
    --constraint "$installed" "$source"
"$python" "$source/docker/missing.py" "$source/requirements/pictures.lock" >"$pictures"
if [ -s "$pictures" ]; then
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps \
        --require-hashes --requirement "$pictures"
fi
"$python" "$source/docker/verify.py" cuda
