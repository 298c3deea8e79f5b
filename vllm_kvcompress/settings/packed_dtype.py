"""Setting of the format in which kept tokens are stored."""

from typing import Annotated, Any, Literal

from vllm_kvcompress.errors import ConfigError
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

    def check(
        self,
        packed_dtype: PackedDtype,
        budget: float | int,
        decode_budget: int | None,
        max_whole: int | None,
        *,
        has_interval: bool,
    ) -> None:
        """Check that the format of kept tokens works with settings that compress repeatedly.

        Args:
            packed_dtype: the resolved format.
            budget: as in `CompressionConfig`.
            decode_budget, max_whole: as in `DecodeSettings` and `PieceSettings`.
            has_interval: whether ``--kv-decode-interval`` was set.
        """
        other = "--kv-max-whole" if max_whole is not None else "--kv-decode-interval"
        if self.reuse != OFF and (max_whole is not None or has_interval):
            raise ConfigError(
                f"--kv-reuse {self.reuse} sets when to pack prompts and outputs, got {other} too;"
                f" remove {other}, or --kv-reuse"
            )
        if packed_dtype != K4V3:
            return
        if decode_budget is not None:
            raise ConfigError(
                f"packed_dtype={K4V3} cannot be combined with --kv-decode-budget {decode_budget},"
                " which compresses a request more than once, because packed tokens would be"
                f" quantised again; remove --kv-decode-budget, or set packed_dtype to {AUTO}"
            )
        # A budget of 1 is one token.
        keeps_all = isinstance(budget, float) and budget == 1.0
        if max_whole is not None and not keeps_all:
            raise ConfigError(
                f"packed_dtype={K4V3} with --kv-max-whole {max_whole} needs a budget of 1.0, got"
                f" budget={budget}, because tokens that a piece keeps would be quantised again when"
                " later pieces drop some of them; set the budget to 1.0, remove --kv-max-whole, or"
                f" set packed_dtype to {AUTO}"
            )


def parse_packed_dtype(value: Any) -> PackedDtype:
    """Parse the format of kept tokens.

    Raises:
        ConfigError: `value` is not a name of PACKED_DTYPES.
    """
    names: dict[str, PackedDtype] = {name: name for name in PACKED_DTYPES}
    return choose("packed_dtype", names, str(value))
