#!/bin/sh
# Runs `vllm serve` with the container's arguments; arguments that start with `vllm` or `kvcompress` run
# unchanged. exec replaces this process, so signals reach the server.
set -eu

for name in HOME HF_HOME VLLM_CACHE_ROOT TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR TMPDIR; do
    eval "folder=\${$name:-}"
    if [ -n "$folder" ] && mkdir -p "$folder" 2>/dev/null && [ -w "$folder" ]; then
        continue
    fi
    # Offline, the models may be on a read-only volume.
    if [ "$name" = HF_HOME ] && [ "${HF_HUB_OFFLINE:-0}" = 1 ]; then
        continue
    fi
    echo "entrypoint: $name must be a folder that user $(id -u) can write, got '$folder':" \
        "mount a volume or a tmpfs there" >&2
    exit 2
done

# vLLM treats an empty key as no key and would serve everyone.
if [ "${VLLM_API_KEY-unset}" = "" ]; then
    echo "entrypoint: VLLM_API_KEY is set but empty: put a key into its Secret," \
        "or unset it" >&2
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
