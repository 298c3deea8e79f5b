"""VllmHook `cli_args`: add ``--kv-compress`` and the other flags to vLLM's commands.

When vLLM turns the parsed arguments into EngineArgs, the flags are merged into
``--additional-config`` as ``{"kvcompress": {...}}``, so neither overwrites the other.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger

from vllm_kvcompress.engine.messages.settings import (
    attach_settings,
    has_settings,
    raw_settings,
    refuse_misspelt_settings,
)
from vllm_kvcompress.errors import ConfigError, KVCompressError
from vllm_kvcompress.methods.entry_points import added_names
from vllm_kvcompress.settings.config import COMPRESS_CONFIG_FLAG, KEYS, CompressionConfig
from vllm_kvcompress.settings.off_switch import (
    OFF_SWITCH,
    is_switched_off,
    without_compression,
)
from vllm_kvcompress.settings.overrides import refuse_taken_names
from vllm_kvcompress.settings.text import RepeatedKeyError, parse_json

logger = init_logger("vllm.kvcompress")

_INSTALLED = "_kvcompress_cli_args"
_FROM_COMMAND = "_kvcompress_from_command"


def _parsed_as(key: str) -> Callable[[str], Any]:
    """Return an argparse type that parses one setting, with the errors of CompressionConfig.

    `fold` later checks all settings together, without parsing text again.
    """

    def parse(text: str) -> Any:
        try:
            settings = CompressionConfig.parse(
                {"compress": "off", "allow_override": "off", key: text}
            )
        except ConfigError as e:
            if is_switched_off():
                return text  # `fold` logs the error
            raise argparse.ArgumentTypeError(str(e)) from None
        value = settings.value(key)
        return value[0] if KEYS[key].repeated else value  # argparse collects repeated flags

    return parse


def _json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object, as an argparse type."""
    problem = ""
    try:
        value = parse_json(text)
    except ValueError as e:
        value, problem = None, f" ({e})"
    if isinstance(value, dict):
        return value
    problem = f"must be a JSON object, got {text!r}{problem}"
    if not is_switched_off():
        raise argparse.ArgumentTypeError(problem)
    logger.warning(
        "%s is set, so wrong settings do not stop the server: --kv-compress-config %s",
        OFF_SWITCH,
        problem,
    )
    return {}


def _without_repeated_settings(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap vLLM's argparse type to refuse a repeated key in the compression settings."""

    def parsing(text: str) -> Any:
        value = parse(text)
        if has_settings(value):
            try:
                parse_json(text)
            except RepeatedKeyError as e:
                if not is_switched_off():
                    raise argparse.ArgumentTypeError(str(e)) from None
        return value

    return parsing


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add our group of flags to a vLLM parser, unless it has them already."""
    if "--kv-compress" in parser._option_string_actions:
        return
    group = parser.add_argument_group(
        title="KV-cache compression",
        description="Settings of the vllm-kvcompress plugin; off unless --kv-compress is given.",
    )
    for key, setting in KEYS.items():
        if not setting.flag:
            continue
        options: dict[str, Any] = {"type": _parsed_as(key), "metavar": setting.metavar}
        help_text = setting.help
        if key == "compress" and (names := added_names("preset")):
            help_text += f" Of other packages: {names}."
        if setting.metavar == "":
            options = {"action": argparse.BooleanOptionalAction}
        # vLLM's --config file passes a list as several values of one flag.
        if setting.repeated:
            options |= {"action": "extend", "nargs": "+"}
        group.add_argument(setting.flag, default=None, help=help_text, **options)
    group.add_argument(
        COMPRESS_CONFIG_FLAG.flag,
        type=_json_object,
        metavar=COMPRESS_CONFIG_FLAG.metavar,
        default=None,
        help=COMPRESS_CONFIG_FLAG.help,
    )
    action = parser._option_string_actions.get("--additional-config")
    if action is not None and callable(action.type):
        action.type = _without_repeated_settings(action.type)


def fold(args: argparse.Namespace) -> None:
    """Move our flags into ``args.additional_config["kvcompress"]``, and check the settings.

    Raises:
        ConfigError: settings contradict each other or name no method, or an alias is already a name
            of the model; not with the off switch.
    """
    typed = dict(getattr(args, "kv_compress_config", None) or {})
    for key in KEYS:
        value = getattr(args, f"kv_{key}", None)
        if value is not None:
            typed[key] = value
    additional_config = getattr(args, "additional_config", None)
    served, adapters = _served_names(args), _adapter_names(args)
    if is_switched_off():
        written = raw_settings(additional_config)
        raw = {**written, **typed} if isinstance(written, Mapping) else written
        settings = without_compression(raw, {*served, *adapters})
        args.additional_config = attach_settings(additional_config, settings)
        return
    refuse_misspelt_settings(additional_config)
    if not typed and not has_settings(additional_config):
        return
    written = raw_settings(additional_config)
    if not isinstance(written, Mapping):
        # Raises ConfigError: the settings are not an object.
        CompressionConfig.parse(written)
    settings = CompressionConfig.parse({**written, **typed})
    refuse_taken_names(settings, served, adapters)
    args.additional_config = attach_settings(additional_config, settings)


def _served_names(args: argparse.Namespace) -> list[str]:
    """Return the names under which vLLM serves the model."""
    names = getattr(args, "served_model_name", None) or getattr(args, "model", None)
    return [names] if isinstance(names, str) else list(names or ())


def _adapter_names(args: argparse.Namespace) -> list[str]:
    return [module.name for module in getattr(args, "lora_modules", None) or ()]


@contextmanager
def ending_the_command() -> Iterator[None]:
    """On a KVCompressError, print it and exit with status 2, as argparse does.

    Raises:
        SystemExit: in place of a KVCompressError.
    """
    try:
        yield
    except KVCompressError as e:
        sys.stderr.write(f"vllm: error: {e}\n")
        raise SystemExit(2) from None


def from_command(engine_args: EngineArgs) -> bool:
    """Return whether `engine_args` came from the command line and include compression settings."""
    return getattr(engine_args, _FROM_COMMAND, False)


def install() -> None:
    """Wrap the two EngineArgs methods; safe to call twice."""
    if getattr(EngineArgs, _INSTALLED, False):
        return
    add_cli_args = EngineArgs.add_cli_args
    from_cli_args = EngineArgs.from_cli_args.__func__

    @functools.wraps(add_cli_args)
    def with_flags(parser: Any, *args: Any, **kwargs: Any) -> Any:
        parser = add_cli_args(parser, *args, **kwargs)
        add_flags(parser)
        return parser

    @functools.wraps(from_cli_args)
    def folding(cls: Any, args: argparse.Namespace) -> Any:
        with ending_the_command():
            fold(args)
        engine_args = from_cli_args(cls, args)
        if has_settings(engine_args.additional_config):
            setattr(engine_args, _FROM_COMMAND, True)
        return engine_args

    EngineArgs.add_cli_args = staticmethod(with_flags)
    EngineArgs.from_cli_args = classmethod(folding)
    setattr(EngineArgs, _INSTALLED, True)
