"""docs/flags.md has every flag, every key and every key of a request, each with its default."""

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from vllm_kvcompress.engine.startup.cli_args import add_flags
from vllm_kvcompress.errors import OverrideError
from vllm_kvcompress.methods.presets import Preset
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import settings_for

PAGE = (Path(__file__).parents[2] / "docs" / "flags.md").read_text()
EVERY_KEY = "--kv-compress-config"
# spellings that are accepted for one more release, and not documented
RENAMED = {
    "--kv-lookahead-yields": "--kv-lookahead-on-pressure",
    "lookahead_yields": "lookahead_on_pressure",
}


def table(title: str) -> dict[str, list[str]]:
    """The table below a heading, by the first code span of each line; cells without backticks."""
    body = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in body.splitlines() if line.startswith("| `")]
    rows = [[cell.strip().replace("`", "") for cell in line.split("|")[1:-1]] for line in lines]
    assert rows, title
    keyed = {row[0].split()[0]: row for row in rows}
    assert len(keyed) == len(rows)
    return keyed


def offered() -> dict[str, argparse.Action]:
    """Every flag of the parser under the name that is documented."""
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    actions = {action.option_strings[0]: action for action in parser._actions}
    return {RENAMED.get(flag, flag): action for flag, action in actions.items()}


def keys() -> dict[str, Any]:
    """The default of every key of the configuration."""
    return {
        RENAMED.get(key, key): field.default
        for key, field in CompressionConfig.model_fields.items()
    }


def written(key: str, default: Any) -> str:
    """A default as the page writes it."""
    if default is False:
        return "off"
    if default is None or default == ():
        return "the method's" if key in Preset.__dataclass_fields__ and default is None else "none"
    return str(default)


def test_the_page_has_every_flag_with_its_value_key_and_default():
    rows = table("Flags")
    assert list(rows) == list(offered())
    for flag, action in offered().items():
        name, key, default, *_ = rows[flag]
        assert name == (f"{flag} {action.metavar}" if action.metavar else flag)
        if flag == EVERY_KEY:
            assert (key, default) == ("every key", "{}")
        else:
            assert key == flag.removeprefix("--kv-").replace("-", "_")
            assert default == written(key, keys()[key]), flag


def test_the_page_has_every_other_key_with_its_default():
    flagged = {row[1] for row in table("Flags").values()}
    rows = table("Keys without a flag")
    assert {*rows} == keys().keys() - flagged
    for key, (_, default, *_) in rows.items():
        assert default == written(key, keys()[key]), key


def test_the_page_has_every_key_of_a_request():
    settings = CompressionConfig.parse({"compress": "cake"})
    with pytest.raises(OverrideError) as refused:
        settings_for(settings, {"kv_anything": 1})
    known = re.findall(r"'(kv_\w+)'", str(refused.value).partition("may set")[2])
    assert len(known) > 3
    assert [*table("Keys of a request")] == [*known, "kv_alias"]


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_spelling_is_not_documented(old):
    assert old not in PAGE


def test_defaults_are_written_in_one_way():
    assert written("usage", False) == "off"
    assert written("window", None) == "the method's"
    assert written("max_whole", None) == "none"
    assert written("scorer_params", ()) == "none"
    assert written("budget", 0.2) == "0.2"
