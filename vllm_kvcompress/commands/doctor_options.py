"""Command-line options of ``kvcompress doctor``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_kvcompress.commands.options import AS_JSON, KEY, URL, settings_from
from vllm_kvcompress.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Options of ``kvcompress doctor``. Each option's help describes it.

    Raises:
        ConfigError: Two options do not fit together.
    """

    context: typer.Context
    model: Annotated[
        str | None,
        typer.Argument(help="Model to start an engine for; put flags of vllm serve after --."),
    ] = None
    url: Annotated[str | None, URL] = None
    compress: str | None = None
    budget: str | None = None
    packed_dtype: str | None = None
    window: int | None = None
    min_prompt: int | None = None
    compress_config: str | None = None
    expect: Annotated[
        str | None,
        typer.Option(help="on or off: fail if compression is not in this state."),
    ] = None
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Prompt length in tokens. Default: just long enough to be compressed."
        ),
    ] = None
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            help="File to use as the prompt, a text or the body of a chat request. Default: a"
            " built-in text."
        ),
    ] = None
    explain: Annotated[
        bool, typer.Option("--explain", help="Also show which tokens each layer kept.")
    ] = False
    picture: Annotated[
        Path | None,
        typer.Option(help="PNG file for --explain. Default: kvcompress-explain.png."),
    ] = None
    timeout: Annotated[float, typer.Option(min=1, help="Time limit of all checks in seconds.")] = (
        900.0
    )
    api_key: Annotated[str | None, KEY] = None
    verbose: Annotated[bool, typer.Option("--verbose", help="Show vLLM's log on stderr.")] = False
    as_json: Annotated[bool, AS_JSON] = False

    def __post_init__(self) -> None:
        if self.expect not in (None, "on", "off"):
            raise ConfigError(f"--expect must be on or off, got {self.expect!r}")
        if self.model is not None and self.url is not None:
            raise ConfigError("give either MODEL to start an engine or --url, not both")
        if self.url is not None and self.arguments:
            raise ConfigError(
                f"flags of vllm serve need MODEL, got --url; remove {' '.join(self.arguments)}"
            )
        if self.explain and self.model is None:
            raise ConfigError("--explain starts its own engine and needs MODEL; give one")
        if self.picture is not None and not self.explain:
            raise ConfigError("--picture needs --explain; add it, or remove --picture")
        if self.model is None and self.url is None and (self.settings or self.arguments):
            raise ConfigError(
                "settings and flags of vllm serve need MODEL or --url; give one of them"
            )

    @property
    def arguments(self) -> list[str]:
        """Return the flags of ``vllm serve`` for the model."""
        return self.context.args

    @property
    def settings(self) -> dict[str, Any]:
        """Return the compression settings that were given, by their keys in `CompressionConfig`.

        Raises:
            ConfigError: ``--kv-compress-config`` is not a JSON object.
        """
        return settings_from(self)

    @property
    def expects_compression(self) -> bool | None:
        """Return whether compression must be on. None accepts both."""
        return None if self.expect is None else self.expect == "on"
