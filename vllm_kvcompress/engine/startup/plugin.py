"""The plugin's hooks: what `register` puts into every vLLM process."""

from vllm_kvcompress.engine.startup import cli_args, configure


def install() -> None:
    """Add the flags and the configuration hook; safe to call twice.

    Both only look whether compression was asked for. If it was, `configure` checks and selects
    everything else.
    """
    cli_args.install()
    configure.install()
