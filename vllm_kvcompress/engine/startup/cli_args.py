"""Seam `cli_args`: ``--kv-compress`` and its companions for every vLLM command that serves.

The flags are folded into ``--additional-config`` as ``{"kvcompress": {...}}`` when vLLM turns the
parsed arguments into EngineArgs: whatever the order of the flags, neither overwrites the other.
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
    refuse_misspelt_settings,
    written_settings,
)
from vllm_kvcompress.errors import ConfigError, KVCompressError
from vllm_kvcompress.methods.presets import METHODS
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import refuse_taken
from vllm_kvcompress.settings.text import RepeatedKeyError, parse_json

_INSTALLED = "_kvcompress_cli_args"
_FROM_COMMAND = "_kvcompress_from_command"

# flag -> (field of CompressionConfig, metavar, help)
FLAGS = {
    "--kv-compress": (
        "compress",
        "METHOD",
        "Compress the KV cache of long prompts at the end of prefill: " + ", ".join(METHODS) + ".",
    ),
    "--kv-budget": (
        "budget",
        "BUDGET",
        "How much to keep: a ratio of the prompt in (0, 1], or a whole number of tokens per layer.",
    ),
    "--kv-window": (
        "window",
        "TOKENS",
        "Observation window: last tokens of a prompt, always kept, whose queries judge the others.",
    ),
    "--kv-lookahead": (
        "lookahead",
        "TOKENS",
        "Tokens of the answer that a prompt stays whole for, and that judge it then; with 0 it is"
        " packed at the end of its prefill.",
    ),
    "--kv-lookahead-yields": (
        "lookahead_yields",
        "WHEN",
        "When a look-ahead is cut short because the KV pool is: before a request would be preempted"
        " (preemption), also for the next one that waits (waiting), or never.",
    ),
    "--kv-protect": (
        "protect",
        "PARTS",
        "Parts of a chat that are kept in any case: system, tools, question, or several of them"
        " separated by commas; with none, all tokens compete.",
    ),
    "--kv-min-prompt": (
        "min_prompt",
        "TOKENS",
        "Prompts of fewer tokens are left whole.",
    ),
    "--kv-min-output": (
        "min_output",
        "TOKENS",
        "Prompts of requests for fewer tokens (max_tokens) are left whole.",
    ),
    "--kv-pressure": (
        "pressure",
        "SHARE",
        "A prompt is left whole while less than this share of the KV pool is in use, the prompt"
        " included.",
    ),
    "--kv-decode-budget": (
        "decode_budget",
        "TOKENS",
        "Tokens per layer that a request may hold while it answers; with none, answers grow.",
    ),
    "--kv-decode-interval": (
        "decode_interval",
        "TOKENS",
        "Tokens of an answer after which it is packed again to --kv-decode-budget: a multiple of"
        " the KV block.",
    ),
    "--kv-max-whole": (
        "max_whole",
        "TOKENS",
        "Prompts of more tokens are packed piece by piece, and may be longer than the KV pool; with"
        " none, every prompt stands whole until its prefill ends.",
    ),
    "--kv-piece": (
        "piece",
        "TOKENS",
        "Tokens of a prompt above --kv-max-whole after which it is packed: a multiple of the KV"
        " block.",
    ),
    "--kv-probe": (
        "probe",
        "TOKENS",
        "The last tokens of a prompt above --kv-max-whole, which judge each of its pieces; with 0 a"
        " piece's own last tokens judge it.",
    ),
    "--kv-probe-first": (
        "probe_first",
        "TOKENS",
        "The first tokens of such a prompt, which judge each of its pieces beside its last ones:"
        " enough that an instruction before the text is among them.",
    ),
    "--kv-allow-override": (
        "allow_override",
        "METHODS",
        "Methods that requests may ask for in vllm_xargs.kv_compress: all, or a list separated by"
        " commas.",
    ),
    "--kv-budget-bounds": (
        "budget_bounds",
        "MIN:MAX",
        "Budgets that requests may ask for in vllm_xargs.kv_budget: 0.05:0.5, 256:4096, or both"
        " separated by a comma.",
    ),
    "--kv-alias": (
        "alias",
        "NAME=METHOD:BUDGET",
        "Another name of the model, whose requests are compressed this way; NAME=off compresses"
        " none. May be repeated.",
    ),
}
_REPEATED = {"--kv-alias"}
_USAGE = ("--kv-usage", "usage")


def _parsed_as(field: str) -> Callable[[str], Any]:
    """Make an argparse type that reads one setting, or refuses it as CompressionConfig does.

    `fold` checks the values together later, and reads no text again.
    """

    def parse(text: str) -> Any:
        try:
            settings = CompressionConfig.parse(
                {"compress": "off", "allow_override": "off", field: text}
            )
        except ConfigError as e:
            raise argparse.ArgumentTypeError(str(e)) from None
        value = getattr(settings, field)
        return value[0] if field == "alias" else value  # argparse collects repeated ones itself

    return parse


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r} ({e})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def _without_repeated_settings(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Make an argparse type that also refuses a setting of compression that is given twice."""

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
    """Add our group of flags to a vLLM parser; nothing happens if it is already there."""
    if "--kv-compress" in parser._option_string_actions:
        return
    group = parser.add_argument_group(
        title="KV-cache compression",
        description="Settings of the vllm-kvcompress plugin; off unless --kv-compress is given.",
    )
    for flag, (field, metavar, text) in FLAGS.items():
        repeated: dict[str, Any] = {}
        # A list in vLLM's --config file arrives as several values of one flag.
        if flag in _REPEATED:
            repeated = {"action": "extend", "nargs": "+"}
        group.add_argument(
            flag, type=_parsed_as(field), metavar=metavar, default=None, help=text, **repeated
        )
    group.add_argument(
        "--kv-usage",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Say in the usage of each compressed answer how much of its prompt was kept.",
    )
    group.add_argument(
        "--kv-compress-config",
        type=_json_object,
        metavar="JSON",
        default=None,
        help="All settings and all parameters of methods, as a JSON object; the flags above win.",
    )
    vllms = parser._option_string_actions.get("--additional-config")
    if vllms is not None and callable(vllms.type):
        vllms.type = _without_repeated_settings(vllms.type)


def fold(args: argparse.Namespace) -> None:
    """Move our flags into ``args.additional_config["kvcompress"]``, and check the whole.

    Raises:
        ConfigError: the settings contradict each other, name no method, or call the model by a
            name that is taken.
    """
    typed = dict(getattr(args, "kv_compress_config", None) or {})
    for flag, field in [*((flag, field) for flag, (field, _, _) in FLAGS.items()), _USAGE]:
        value = getattr(args, flag[2:].replace("-", "_"), None)
        if value is not None:
            typed[field] = value
    additional_config = getattr(args, "additional_config", None)
    refuse_misspelt_settings(additional_config)
    if not typed and not has_settings(additional_config):
        return
    written = written_settings(additional_config)
    if not isinstance(written, Mapping):
        # The parser refuses it, and says what must hold.
        CompressionConfig.parse(written)
    settings = CompressionConfig.parse({**written, **typed})
    refuse_taken(settings, _served_names(args), _adapter_names(args))
    args.additional_config = attach_settings(additional_config, settings)


def _served_names(args: argparse.Namespace) -> list[str]:
    """The names that vLLM itself serves the model under."""
    names = getattr(args, "served_model_name", None) or getattr(args, "model", None)
    return [names] if isinstance(names, str) else list(names or ())


def _adapter_names(args: argparse.Namespace) -> list[str]:
    return [module.name for module in getattr(args, "lora_modules", None) or ()]


@contextmanager
def ending_the_command() -> Iterator[None]:
    """End the command as argparse does, with one sentence and status 2, if we refuse something.

    Raises:
        SystemExit: in place of a KVCompressError.
    """
    try:
        yield
    except KVCompressError as e:
        sys.stderr.write(f"vllm: error: {e}\n")
        raise SystemExit(2) from None


def from_command(engine_args: EngineArgs) -> bool:
    """Whether `engine_args` were typed as flags, and compression is among them."""
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
