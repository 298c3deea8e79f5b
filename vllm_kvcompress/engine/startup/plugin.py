"""The hooks that the plugin's `register` installs in every vLLM process."""

from vllm_kvcompress.engine.startup import cli_args, configure


def install() -> None:
    """Add the flags and the configuration hook; safe to call twice.

    Both only look for compression settings. `configure` checks and selects everything else.
    """
    cli_args.install()
    configure.install()
