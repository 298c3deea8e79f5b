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

from vllm_kvcompress.engine.messages.settings import (
    attach_settings,
    has_settings,
    raw_settings,
    refuse_misspelt_settings,
)
from vllm_kvcompress.errors import ConfigError, KVCompressError
from vllm_kvcompress.methods.presets import METHODS
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.lookahead import RENAMED_KEYS
from vllm_kvcompress.settings.overrides import refuse_taken_names
from vllm_kvcompress.settings.text import RepeatedKeyError, parse_json

_INSTALLED = "_kvcompress_cli_args"
_FROM_COMMAND = "_kvcompress_from_command"

# flag -> (field of CompressionConfig, metavar, help); docs/flags.md says the same
FLAGS = {
    "--kv-compress": (
        "compress",
        "METHOD",
        "Compress the KV cache of long prompts after prefill, with this method: "
        + ", ".join(METHODS)
        + ".",
    ),
    "--kv-budget": (
        "budget",
        "BUDGET",
        "How much of each prompt to keep, the observation window included: a ratio in (0, 1], or a"
        " whole number of tokens per layer.",
    ),
    "--kv-packed-dtype": (
        "packed_dtype",
        "FORMAT",
        "Format of kept tokens: the KV cache's dtype (auto), or packed with 4-bit keys and 3-bit"
        " values (k4v3), 4 times as many tokens in the same memory as at 16 bits.",
    ),
    "--kv-window": (
        "window",
        "TOKENS",
        "Observation window: the last prompt tokens, which are always kept and whose queries score"
        " the others.",
    ),
    "--kv-lookahead": (
        "lookahead",
        "TOKENS",
        "Compression waits for this many output tokens, whose queries then score the prompt. 0"
        " compresses when the prefill ends.",
    ),
    "--kv-lookahead-on-pressure": (
        "lookahead_on_pressure",
        "WHEN",
        "When a short KV pool ends look-aheads early: before a request would be preempted"
        " (preemption), also to admit a waiting request (waiting), or never.",
    ),
    "--kv-protect": (
        "protect",
        "PARTS",
        "Parts of a chat that every layer keeps: system, tools, question, or several of them"
        " separated by commas. With none, no part is protected.",
    ),
    "--kv-min-prompt": (
        "min_prompt",
        "TOKENS",
        "Prompts with fewer tokens stay uncompressed.",
    ),
    "--kv-min-output": (
        "min_output",
        "TOKENS",
        "Prompts of requests with a smaller max_tokens stay uncompressed.",
    ),
    "--kv-pressure": (
        "pressure",
        "SHARE",
        "A prompt stays uncompressed while less than this share of the KV pool is in use, counting"
        " the prompt itself.",
    ),
    "--kv-decode-budget": (
        "decode_budget",
        "TOKENS",
        "Tokens per layer that a request may hold while it generates. With none, the KV cache of"
        " the output grows.",
    ),
    "--kv-decode-interval": (
        "decode_interval",
        "TOKENS",
        "Output tokens between two compressions to --kv-decode-budget: a multiple of the KV block."
        " With --kv-packed-dtype k4v3 and no decode budget: output tokens between two"
        " packings of the output in k4v3. No token is dropped, and the number is rounded up to"
        " whole packed pages.",
    ),
    "--kv-max-whole": (
        "max_whole",
        "TOKENS",
        "Prompts with more tokens are compressed piece by piece during prefill, and may be longer"
        " than the KV pool. With none, every prompt is compressed after its prefill.",
    ),
    "--kv-piece": (
        "piece",
        "TOKENS",
        "Tokens of a prompt longer than --kv-max-whole between two compressions: a multiple of the"
        " KV block.",
    ),
    "--kv-probe": (
        "probe",
        "TOKENS",
        "The last tokens of a prompt longer than --kv-max-whole, whose queries score each of its"
        " pieces. With 0, each piece's last tokens score it.",
    ),
    "--kv-probe-first": (
        "probe_first",
        "TOKENS",
        "The first tokens of such a prompt, whose queries also score each piece. Set it high enough"
        " to include an instruction that comes before the text.",
    ),
    "--kv-allow-override": (
        "allow_override",
        "METHODS",
        "Methods that requests may choose in vllm_xargs.kv_compress: all, or a list separated by"
        " commas.",
    ),
    "--kv-budget-bounds": (
        "budget_bounds",
        "MIN:MAX",
        "Budgets that requests may choose in vllm_xargs.kv_budget: 0.05:0.5, 256:4096, or both"
        " separated by a comma.",
    ),
    "--kv-alias": (
        "alias",
        "NAME=METHOD:BUDGET",
        "Another model name, whose requests use this method and budget. NAME=METHOD:BUDGET:k4v3"
        " also sets --kv-packed-dtype. NAME=off compresses nothing. May be repeated.",
    ),
}
_REPEATED = {"--kv-alias"}
_USAGE = ("--kv-usage", "usage")
# old flag -> (its old key, the current flag); accepted for one release, not in --help
_RENAMED = {
    f"--kv-{old.replace('_', '-')}": (old, f"--kv-{new.replace('_', '-')}")
    for old, new in RENAMED_KEYS.items()
}


def _parsed_as(field: str) -> Callable[[str], Any]:
    """Return an argparse type that parses one setting, with the errors of CompressionConfig.

    `fold` later checks all settings together, without parsing text again.
    """

    def parse(text: str) -> Any:
        try:
            settings = CompressionConfig.parse(
                {"compress": "off", "allow_override": "off", field: text}
            )
        except ConfigError as e:
            raise argparse.ArgumentTypeError(str(e)) from None
        value = getattr(settings, field)
        return value[0] if field == "alias" else value  # argparse collects repeated flags

    return parse


def _json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object, as an argparse type."""
    try:
        value = parse_json(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r} ({e})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def _without_repeated_settings(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap vLLM's argparse type to refuse a repeated key in the compression settings."""

    def parsing(text: str) -> Any:
        value = parse(text)
        if has_settings(value):
            try:
                parse_json(text)
            except RepeatedKeyError as e:
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
    for flag, (field, metavar, text) in FLAGS.items():
        repeated: dict[str, Any] = {}
        # vLLM's --config file passes a list as several values of one flag.
        if flag in _REPEATED:
            repeated = {"action": "extend", "nargs": "+"}
        group.add_argument(
            flag, type=_parsed_as(field), metavar=metavar, default=None, help=text, **repeated
        )
    group.add_argument(
        "--kv-usage",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Report in the usage of each compressed request how many prompt tokens were kept.",
    )
    group.add_argument(
        "--kv-compress-config",
        type=_json_object,
        metavar="JSON",
        default=None,
        help="Any settings and method parameters, as a JSON object. The flags above win over it.",
    )
    for old_flag, (_, flag) in _RENAMED.items():
        group.add_argument(
            old_flag, type=_parsed_as(FLAGS[flag][0]), default=None, help=argparse.SUPPRESS
        )
    action = parser._option_string_actions.get("--additional-config")
    if action is not None and callable(action.type):
        action.type = _without_repeated_settings(action.type)


def fold(args: argparse.Namespace) -> None:
    """Move our flags into ``args.additional_config["kvcompress"]``, and check the settings.

    Raises:
        ConfigError: settings contradict each other or name no method, a renamed flag is set under
            both names, or an alias is already a name of the model.
    """
    typed = dict(getattr(args, "kv_compress_config", None) or {})
    flags = [(flag, field) for flag, (field, _, _) in FLAGS.items()]
    old_flags = [(flag, key) for flag, (key, _) in _RENAMED.items()]
    for flag, field in [*flags, *old_flags, _USAGE]:
        value = getattr(args, flag[2:].replace("-", "_"), None)
        if value is not None:
            typed[field] = value
    additional_config = getattr(args, "additional_config", None)
    refuse_misspelt_settings(additional_config)
    if not typed and not has_settings(additional_config):
        return
    written = raw_settings(additional_config)
    if not isinstance(written, Mapping):
        # Raises ConfigError: the settings are not an object.
        CompressionConfig.parse(written)
    settings = CompressionConfig.parse({**written, **typed})
    refuse_taken_names(settings, _served_names(args), _adapter_names(args))
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
