"""Which of vLLM's model runners draft."""

from importlib.util import find_spec


def on_v2() -> bool:
    """Whether Model Runner V2 drafts out of the prompt: since vLLM 0.32."""
    return find_spec("vllm.v1.worker.gpu.spec_decode.ngram") is not None
