"""KV-cache compression for vLLM: long prompts keep the tokens that score highest."""

import importlib.metadata


def __getattr__(name: str) -> str:
    """Return `__version__` from the metadata of the installed package.

    The version is read lazily because a source folder that is not installed has no metadata.
    """
    if name == "__version__":
        try:
            return importlib.metadata.version("vllm-kvcompress")
        except importlib.metadata.PackageNotFoundError as e:
            raise AttributeError(f"{__name__} is not installed, so it has no version") from e
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Register the plugin with vLLM (entry point group ``vllm.general_plugins``).

    Adds the command-line flags and the hook that reads ``additional_config["kvcompress"]``. It
    replaces no vLLM class until an engine is configured with compression on. Calling it twice is
    safe.
    """
    from vllm_kvcompress.engine.startup import cli_args, configure

    cli_args.install()
    configure.install()
