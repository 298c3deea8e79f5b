#!/bin/sh
# Installs this package beside the vLLM of the Python it is run with, and changes nothing there:
# every installed version is a constraint, so pip adds what is missing or fails. Of matplotlib's lock
# it takes, by its hashes, what is not there in any version.
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
