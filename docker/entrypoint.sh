#!/bin/sh
# Starts `vllm serve` with the arguments of the container; `vllm ...` and `kvcompress ...` run as
# they are. What is started takes this process's place, so signals reach it.
set -eu

for name in HOME HF_HOME VLLM_CACHE_ROOT TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR TMPDIR; do
    eval "folder=\${$name:-}"
    if [ -n "$folder" ] && mkdir -p "$folder" 2>/dev/null && [ -w "$folder" ]; then
        continue
    fi
    # models that are all there may lie on a read-only volume
    if [ "$name" = HF_HOME ] && [ "${HF_HUB_OFFLINE:-0}" = 1 ]; then
        continue
    fi
    echo "entrypoint: $name must name a folder that user $(id -u) may write, got '$folder';" \
        "mount a volume or a tmpfs there" >&2
    exit 2
done

# vLLM takes an empty key for none, and would serve everybody
if [ "${VLLM_API_KEY-unset}" = "" ]; then
    echo "entrypoint: VLLM_API_KEY must hold a key or be unset, and it is set and empty;" \
        "write the key into the Secret that it comes from" >&2
    exit 2
fi

case ${1:-} in
vllm | kvcompress) ;;
*) set -- vllm serve "$@" ;;
esac
# As process 1, Python would ignore SIGTERM until vLLM has set its handler, after loading the model.
if [ $$ -eq 1 ] && command -v tini >/dev/null; then
    exec tini -- "$@"
fi
exec "$@"
