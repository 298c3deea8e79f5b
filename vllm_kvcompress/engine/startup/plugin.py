"""The plugin's hooks: what `register` puts into every vLLM process."""

from vllm_kvcompress.engine.startup import cli_args, configure


def install() -> None:
    """Add the flags and the configuration hook; safe to call twice.

    Both only look whether compression was asked for. Everything else is checked and selected by
    `configure` once it was.
    """
    cli_args.install()
    configure.install()
