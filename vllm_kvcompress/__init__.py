"""KV-cache compression for vLLM: prompts are compressed at the end of prefill."""

__version__ = "0.1.0"


def register() -> None:
    """vLLM's plugin entry point (group ``vllm.general_plugins``); safe to call twice.

    Adds the command-line flags and the hook that reads ``additional_config["kvcompress"]``.
    Nothing of vLLM is replaced until an engine is configured with compression on.
    """
    from vllm_kvcompress.engine.startup.plugin import install

    install()
