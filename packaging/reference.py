"""Generate docs, command flags and deployment settings from the settings and the refusals.

``make reference`` writes three tables of docs/flags.md, two of docs/compatibility.md, the flags of
the ``kvcompress`` commands, and the names, values and arguments of deploy/base.
"""

import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, get_origin, get_type_hints

from vllm_kvcompress.commands.doctor_options import DoctorOptions
from vllm_kvcompress.commands.plan.options import PlanOptions
from vllm_kvcompress.methods.preset import Preset
from vllm_kvcompress.refusals.model import MODEL
from vllm_kvcompress.refusals.server import SERVER
from vllm_kvcompress.refusals.settings import METHOD
from vllm_kvcompress.refusals.tested import untested_pairs
from vllm_kvcompress.settings.config import COMPRESS_CONFIG_FLAG, KEYS
from vllm_kvcompress.settings.declared import DEPLOY_DEFAULT, SettingDeclaration
from vllm_kvcompress.settings.request_keys import REQUEST_KEYS, RequestKey

ROOT = Path(__file__).parents[1]
COMMANDS = ROOT / "vllm_kvcompress" / "commands"
PAGE = ROOT / "docs" / "flags.md"
COMPATIBILITY = ROOT / "docs" / "compatibility.md"
BASE = ROOT / "deploy" / "base"
_CODE = re.compile(r"--[a-z0-9-]+(?: k4v3)?|\b\w+_\w+(?:\.\w+)*|\bNAME=[\w:=]+")
"""Words of a flag's help that the page sets as code."""
_FLAG = re.compile(r"--[a-z][^,]*")


def generated() -> Iterator[tuple[Path, str]]:
    """Yield each generated file with the text that it should have."""
    page = PAGE.read_text()
    flags = [setting for setting in KEYS.values() if setting.flag]
    page = _with_table(page, "Flags", [*map(_flag_row, flags), _COMPRESS_CONFIG_ROW])
    others = [setting for setting in KEYS.values() if not setting.flag]
    page = _with_table(page, "Keys without a flag", map(_key_row, others))
    yield PAGE, _with_table(page, "Keys of a request", map(_request_row, REQUEST_KEYS.values()))
    page = _with_table(COMPATIBILITY.read_text(), "What is refused, and why", _refused_rows())
    yield COMPATIBILITY, _with_table(page, "Not tested together", _untested_rows())
    yield COMMANDS / "kv_flags.py", _command_flags()
    deployed = [setting for setting in flags if setting.deployed]
    manifest = BASE / "deployment.yaml"
    yield manifest, _with_arguments(manifest.read_text(), deployed)
    env = BASE / "settings.env"
    yield env, _with_values(env.read_text(), deployed)


def _with_table(page: str, title: str, rows: Iterable[str]) -> str:
    """Return the page with the rows of the table below a heading replaced."""
    before, heading, rest = page.partition(f"\n## {title}\n")
    table = re.compile(r"(\| .+ \|\n\|[-|]+\|\n)(?:\|.*\n)*")
    return before + heading + table.sub(lambda match: match[1] + "".join(rows), rest, count=1)


def _refused_rows() -> Iterator[str]:
    names: dict[str, list[str]] = {}
    for rule in (*MODEL, *SERVER, *METHOD):
        if rule.name:
            names.setdefault(rule.because or rule.reason, []).append(rule.name)
    for because, refused in names.items():
        yield _row(("; ".join(refused), because))


def _untested_rows() -> Iterator[str]:
    others: dict[str, list[str]] = {}
    for first, second in untested_pairs():
        others.setdefault(first, []).append(second)
    for feature, names in others.items():
        yield _row(_FLAG.sub(r"`\g<0>`", cell) for cell in (feature, ", ".join(names)))


def _flag_row(setting: SettingDeclaration) -> str:
    flag = f"{setting.flag} {setting.metavar}".strip()
    meaning = " ".join([_CODE.sub(r"`\g<0>`", setting.help), setting.extra_docs]).strip()
    return _row((f"`{flag}`", _default(setting), meaning))


def _key_row(setting: SettingDeclaration) -> str:
    return _row((f"`{setting.key}`", _default(setting), setting.help))


_COMPRESS_CONFIG_ROW = (
    f"| `{COMPRESS_CONFIG_FLAG.flag} {COMPRESS_CONFIG_FLAG.metavar}` | `{{}}` |"
    " Any keys of this page, as one JSON object. |\n"
)


def _request_row(key: RequestKey) -> str:
    return _row((f"`{key.name}`", key.needs, key.help))


def _row(cells: Iterable[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|\n"


def _default(setting: SettingDeclaration) -> str:
    """Return a default as the page writes it."""
    if setting.default is False:
        return "off"
    if setting.default is None and setting.key in Preset.__dataclass_fields__:
        return "the method's"
    return "none" if setting.default in (None, ()) else f"`{setting.default}`"


def _command_flags() -> str:
    """Return the module with the flags of all settings that a command of ours takes."""
    hints = get_type_hints(PlanOptions, include_extras=True) | get_type_hints(
        DoctorOptions, include_extras=True
    )
    taken = {name for name, hint in hints.items() if get_origin(hint) is not Annotated}
    settings = [*KEYS.values(), COMPRESS_CONFIG_FLAG]
    entries = (_entry(setting) for setting in settings if setting.key in taken)
    return f"{_COMMAND_FLAGS_START}{''.join(entries)}}}\n"


_COMMAND_FLAGS_START = '''"""Metavar and help of the flags of ``vllm serve`` that our commands take.

``make reference`` writes this file, so that commands start without importing settings and torch.
"""

from collections.abc import Mapping

KV_FLAGS: Mapping[str, tuple[str, str]] = {
'''


def _entry(setting: SettingDeclaration) -> str:
    # As ruff formats it: on one line if it fits.
    width = 89 if len(setting.help) <= 89 else 88
    lines = textwrap.wrap(setting.help, width, break_on_hyphens=False, break_long_words=False)
    text = "\n        ".join([f'"{lines[0]}"', *(f'" {line}"' for line in lines[1:])])
    return f"""    "{setting.key}": (
        "{setting.metavar}",
        {text},
    ),
"""


def _with_arguments(manifest: str, deployed: Iterable[SettingDeclaration]) -> str:
    """Return the manifest with an argument of vLLM for each deployed setting."""
    lines = (
        f"            - {setting.flag + '=' if setting.metavar else ''}$({_variable(setting)})\n"
        for setting in deployed
    )
    arguments = re.compile(r"(?: +- (?:--kv-[a-z-]+=)?\$\(KV_\w+\)\n)+")
    return arguments.sub("".join(lines), manifest, count=1)


def _with_values(env: str, deployed: Iterable[SettingDeclaration]) -> str:
    """Return the variables with the value of each deployed setting.

    Raises:
        ValueError: a deployed setting has no line, or another KV_ variable has one.
    """
    values = {_variable(setting): _deployed_value(setting) for setting in deployed}
    found = re.findall(r"^(KV_\w+)=", env, re.MULTILINE)
    if sorted(found) != sorted(values):
        raise ValueError(f"deploy/base/settings.env must set {sorted(values)}, got {sorted(found)}")
    return re.sub(
        r"^(KV_\w+)=.*$", lambda match: f"{match[1]}={values[match[1]]}", env, flags=re.MULTILINE
    )


def _variable(setting: SettingDeclaration) -> str:
    return f"KV_{setting.key.upper()}"


def _deployed_value(setting: SettingDeclaration) -> str:
    if not setting.metavar:
        # The variable is a complete flag.
        return setting.flag if setting.default else setting.flag.replace("--", "--no-", 1)
    if setting.deployed != DEPLOY_DEFAULT:
        return setting.deployed
    return "none" if setting.default in (None, ()) else str(setting.default)


if __name__ == "__main__":
    for path, text in generated():
        path.write_text(text)
