"""A command's options as one value: typer parses the fields of a dataclass."""

import dataclasses
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from vllm_kvcompress.settings.text import PLAIN_DIGITS, has_plain_digits

Options = TypeVar("Options")


def takes(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Make a typer command of a function that takes one value.

    The decorated command has a keyword parameter for each field of `options`, with its annotation
    and default; it builds the value from what was typed, and calls the function with it.

    Args:
        options: a dataclass whose fields are ``Annotated[T, typer.Option(...)]``, or are annotated
            with ``typer.Argument(...)``. A field without a default must be given.
    """
    hints = get_type_hints(options, include_extras=True)
    parameters = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(options)  # type: ignore[arg-type]
    ]

    def decorate(function: Callable[[Options], None]) -> Callable[..., None]:
        def command(**typed: Any) -> None:
            function(options(**typed))

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


class PlainNumbers(TyperCommand):
    """A typer command whose numbers are refused in other digits than 0 to 9."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words behind the command's name.

        Raises:
            typer.BadParameter: a word is a number only as Python reads it.
        """
        flag = ""
        for word in args[: args.index("--") if "--" in args else None]:
            name, equals, text = word.partition("=")
            text = text if equals else word
            if _is_number(text) and not has_plain_digits(text):
                place = f"{name if equals else flag} ".lstrip()
                raise typer.BadParameter(f"{place}{PLAIN_DIGITS}, got {text!r}", ctx=ctx)
            flag = word if word.startswith("-") else ""
        return super().parse_args(ctx, args)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
