"""Setting of the format in which kept tokens are stored."""

from typing import Annotated, Any, Literal

from vllm_kvcompress.methods.base import choose
from vllm_kvcompress.settings.declared import Parsed, SettingsGroup, declare

PackedDtype = Literal["auto", "k4v3"]
AUTO: PackedDtype = "auto"
K4V3: PackedDtype = "k4v3"
PACKED_DTYPES = (AUTO, K4V3)
Reuse = Literal["off", "late", "grid"]
OFF: Reuse = "off"
LATE: Reuse = "late"
GRID: Reuse = "grid"


def _parse(value: Any) -> PackedDtype | None:
    return None if value is None else parse_packed_dtype(value)


def _parse_reuse(value: Any) -> Reuse:
    names: dict[str, Reuse] = {name: name for name in (OFF, LATE, GRID)}
    return choose("reuse", names, str(value))


class PackedSettings(SettingsGroup):
    """`CompressionConfig.packed`: the format of kept tokens."""

    dtype: Annotated[PackedDtype | None, Parsed(_parse)] = declare(
        None, "FORMAT", key="packed_dtype", deployed=AUTO
    )
    """Format of kept tokens. auto: the KV cache's dtype. k4v3: 4-bit keys and 3-bit values, which
    hold 4 times as many tokens in the same memory as 16 bits.

    [k4v3](methods.md#110-packed-format-k4v3) with `--kv-max-whole` needs a budget of `1.0`."""

    reuse: Annotated[Reuse, Parsed(_parse_reuse)] = declare(OFF, "WHEN")
    """Keep packed pages in the prefix cache, so that later turns of a chat find them: off, grid or
    late. It needs k4v3 at a budget of 1.0.

    [Contexts that survive the request](reuse.md) compares `grid` and `late`."""


def parse_packed_dtype(value: Any) -> PackedDtype:
    """Parse the format of kept tokens.

    Raises:
        ConfigError: `value` is not a name of PACKED_DTYPES.
    """
    names: dict[str, PackedDtype] = {name: name for name in PACKED_DTYPES}
    return choose("packed_dtype", names, str(value))
