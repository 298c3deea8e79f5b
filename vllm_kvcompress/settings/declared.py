"""Declare a setting in one place: its key, flag, default, unit, help and deployed value.

The flags of ``vllm serve`` and the errors use the declarations directly. ``make reference`` writes
the flags of ``kvcompress``, the tables of docs/flags.md and the settings of deploy/ from them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

DEPLOY_DEFAULT = "its own default"


@dataclass(frozen=True, slots=True)
class Parsed:
    """Marks a field's type: `parse` converts what users write before pydantic checks it."""

    parse: Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingDeclaration:
    """A declared setting.

    Args:
        metavar: name of the flag's value in --help; "" for a pair of flags such as ``--kv-usage``
            and ``--no-kv-usage``; None if the setting has no flag.
        repeated: whether the flag may be repeated.
        deployed: value in deploy/base/settings.env; DEPLOY_DEFAULT for the setting's own default,
            and "" if it is not there.
        per_method: whether another method ignores the value and uses its own preset.
        per_engine: whether the setting is for the whole engine and is not copied to `variants`.
        key: the key that users write.
        group: field of `CompressionConfig` that holds the setting's group; "" without a group.
        name: field of `CompressionConfig` or of the group.
        default: value if the key is not set.
        help: help of the flag.
        extra_docs: sentences that docs/flags.md adds to `help`.
    """

    metavar: str | None = None
    repeated: bool = False
    deployed: str = ""
    per_method: bool = False
    per_engine: bool = False
    key: str = ""
    group: str = ""
    name: str = ""
    default: Any = None
    help: str = ""
    extra_docs: str = ""

    @property
    def flag(self) -> str:
        """Return the flag, or "" if the setting has none."""
        return "" if self.metavar is None else flag_of(self.key)


def declare(default: Any, metavar: str | None = None, *, key: str = "", **rest: Any) -> Any:
    """Declare a field of a group, with arguments of `SettingDeclaration` and of pydantic's Field.

    The first paragraph of the field's docstring is the help of its flag, and docs/flags.md adds the
    others.
    """
    ours = {name: rest.pop(name) for name in SettingDeclaration.__slots__ if name in rest}
    extra: dict[str, Any] = {"setting": SettingDeclaration(metavar=metavar, **ours)}
    return Field(default, alias=key or None, json_schema_extra=extra, **rest)


def flag_of(key: str) -> str:
    """Return the name of a key's flag."""
    return f"--kv-{key.replace('_', '-')}"


class SettingsGroup(BaseModel):
    """Base of `CompressionConfig` and of its groups."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _parse(cls, value: Any, info: ValidationInfo) -> Any:
        for mark in cls.model_fields[str(info.field_name)].metadata:
            value = mark.parse(value) if isinstance(mark, Parsed) else value
        return value

    @classmethod
    def declared(cls, group: str = "") -> Iterator[SettingDeclaration]:
        """Yield the settings of this class and of its groups.

        Args:
            group: as in `SettingDeclaration`.
        """
        for name, field in cls.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, SettingsGroup):
                yield from field.annotation.declared(name)
                continue
            first, *extra_docs = str(field.description).split("\n\n")
            extra: Any = field.json_schema_extra
            yield replace(
                extra["setting"],
                key=field.alias or name,
                group=group,
                name=name,
                default=field.default,
                help=" ".join(first.split()),
                extra_docs=" ".join(" ".join(extra_docs).split()),
            )
