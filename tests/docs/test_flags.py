"""docs/flags.md documents all flags, configuration keys and request keys with their defaults."""

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from vllm_kvcompress.engine.startup.cli_args import add_flags
from vllm_kvcompress.errors import OverrideError
from vllm_kvcompress.methods.preset import Preset
from vllm_kvcompress.settings.config import KEYS, CompressionConfig
from vllm_kvcompress.settings.request_options import RequestOptions

PAGE = (Path(__file__).parents[2] / "docs" / "flags.md").read_text()
ALL_KEYS_FLAG = "--kv-compress-config"


def table(title: str) -> dict[str, list[str]]:
    """Return the rows of the table below a heading by their first word, without backticks."""
    body = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in body.splitlines() if line.startswith("| `")]
    rows = [[cell.strip().replace("`", "") for cell in line.split("|")[1:-1]] for line in lines]
    assert rows, title
    keyed = {row[0].split()[0]: row for row in rows}
    assert len(keyed) == len(rows)
    return keyed


def flags() -> dict[str, argparse.Action]:
    """Return the parser's flags."""
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    return {action.option_strings[0]: action for action in parser._actions}


def keys() -> dict[str, Any]:
    """Return the default of every key of the configuration."""
    return {key: CompressionConfig().value(key) for key in KEYS}


def key_of(flag: str) -> str:
    """Return the key of a flag by the page's rule."""
    return flag.removeprefix("--kv-").replace("-", "_")


def as_documented(key: str, default: Any) -> str:
    """Return a default as the page writes it."""
    if default is False:
        return "off"
    if default is None or default == ():
        return "the method's" if key in Preset.__dataclass_fields__ and default is None else "none"
    return str(default)


def test_the_page_has_every_flag_with_its_value_key_and_default():
    rows = table("Flags")
    assert list(rows) == list(flags())
    for flag, action in flags().items():
        name, default, _ = rows[flag]
        assert name == (f"{flag} {action.metavar}" if action.metavar else flag)
        if flag == ALL_KEYS_FLAG:
            assert default == "{}"
        else:
            key = key_of(flag)
            assert default == as_documented(key, keys()[key]), flag


def test_the_page_has_every_other_key_with_its_default():
    keys_with_flag = {key_of(flag) for flag in table("Flags")}
    rows = table("Keys without a flag")
    assert {*rows} == keys().keys() - keys_with_flag
    assert keys_with_flag - keys().keys() == {key_of(ALL_KEYS_FLAG)}
    for key, (_, default, *_) in rows.items():
        assert default == as_documented(key, keys()[key]), key


def test_the_page_has_every_key_of_a_request():
    settings = CompressionConfig.parse({"compress": "cake"})
    with pytest.raises(OverrideError) as refused:
        RequestOptions.parse(settings, {"kv_anything": 1})
    known = re.findall(r"'(kv_\w+)'", str(refused.value).partition("may set")[2])
    assert len(known) > 3
    assert [*table("Keys of a request")] == [*known, "kv_alias"]
