"""Typer commands that take their options as one dataclass, and settings given as flags."""

import dataclasses
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from vllm_kvcompress.commands.kv_flags import KV_FLAGS
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.entry_points import added_names
from vllm_kvcompress.settings.text import PLAIN_DIGITS, has_plain_digits, parse_json

Options = TypeVar("Options")
AS_JSON = typer.Option("--json", help="Print one JSON document and nothing else.")
URL = typer.Option(
    "--url", metavar="URL", help="Address of a running server, such as http://127.0.0.1:8000."
)
KEY = typer.Option(
    "--api-key", envvar="VLLM_API_KEY", help="API key of the server, if it requires one."
)


def takes_options(
    options: type[Options],
) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Return a decorator that turns a function of one options value into a typer command.

    The command has a keyword parameter for each field of `options`, with the field's annotation
    and default. It builds the value from the parsed parameters and calls the function with it.

    Args:
        options: a dataclass whose fields are ``Annotated[T, typer.Option(...)]`` or
            ``Annotated[T, typer.Argument(...)]``, or plain types if named in `KV_FLAGS`. A
            field without a default is required.
    """
    hints = get_type_hints(options, include_extras=True)
    parameters = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=_annotation(field.name, hints[field.name]),
        )
        for field in dataclasses.fields(options)  # type: ignore[arg-type]
    ]

    def decorate(function: Callable[[Options], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            function(options(**values))

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _annotation(name: str, hint: Any) -> Any:
    """Return a field's annotation; for a plain type named in `KV_FLAGS`, with its option."""
    if name not in KV_FLAGS or get_origin(hint) is Annotated:
        return hint
    metavar, text = KV_FLAGS[name]
    flag = f"--kv-{name.replace('_', '-')}"
    return Annotated[hint, typer.Option(flag, metavar=metavar, help=text)]


class PlainNumbers(TyperCommand):
    """Typer command that refuses numbers with characters that only Python accepts, as in 1_000.

    Its help names the methods of other packages.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with the methods of other packages if the command takes a method."""
        options = {option for parameter in self.params for option in parameter.opts}
        if options & {"--kv-compress", "--methods"} and (names := added_names("preset")):
            self.epilog = f"Methods of other packages: {names}."
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments of the command.

        Raises:
            typer.BadParameter: An argument is a number with characters that only Python accepts.
        """
        flag = ""
        for arg in args[: args.index("--") if "--" in args else None]:
            name, equals, text = arg.partition("=")
            text = text if equals else arg
            if _is_number(text) and not has_plain_digits(text):
                prefix = f"{name if equals else flag} ".lstrip()
                raise typer.BadParameter(f"{prefix}{PLAIN_DIGITS}, got {text!r}", ctx=ctx)
            flag = arg if arg.startswith("-") else ""
        return super().parse_args(ctx, args)


def settings_from(options: Any) -> dict[str, Any]:
    """Return the settings given on the command line, by their keys in `CompressionConfig`.

    The other flags override ``--kv-compress-config``.

    Args:
        options: a dataclass value with a field `compress_config` and others named in `KV_FLAGS`.

    Raises:
        ConfigError: ``--kv-compress-config`` is not a JSON object.
    """
    names = [field.name for field in dataclasses.fields(options) if field.name in KV_FLAGS]
    flags = {name: getattr(options, name) for name in names}
    everything = flags.pop("compress_config")
    settings = {} if everything is None else json_object("--kv-compress-config", everything)
    return settings | {key: value for key, value in flags.items() if value not in (None, [])}


def json_object(flag: str, text: str) -> dict[str, Any]:
    """Return the JSON object that a flag was given.

    Raises:
        ConfigError: `text` is not a JSON object.
    """
    try:
        found = parse_json(text)
    except ValueError as e:
        raise ConfigError(f"{flag} must be a JSON object, got {text!r} ({e})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{flag} must be a JSON object, got {text!r}")
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
