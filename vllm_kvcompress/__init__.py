"""KV-cache compression for vLLM: prompts are compressed at the end of prefill."""

import importlib.metadata


def __getattr__(name: str) -> str:
    """Look up `__version__`, which only pyproject.toml states, in the installed package.

    It is looked up when it is asked for, since a source folder that is not installed has none.
    """
    if name == "__version__":
        try:
            return importlib.metadata.version("vllm-kvcompress")
        except importlib.metadata.PackageNotFoundError as e:
            raise AttributeError(f"{__name__} is not installed, so that it has no version") from e
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """vLLM's plugin entry point (group ``vllm.general_plugins``); safe to call twice.

    Adds the command-line flags and the hook that reads ``additional_config["kvcompress"]``.
    Nothing of vLLM is replaced until an engine is configured with compression on.
    """
    from vllm_kvcompress.engine.startup.plugin import install

    install()
