"""A method with the settings of look-ahead, pieces and decode budget that affect it."""

from dataclasses import dataclass

from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.method import Method
from vllm_kvcompress.methods.preset import min_window, scores_by_window
from vllm_kvcompress.settings.groups import DecodeSettings, PieceSettings
from vllm_kvcompress.settings.packed_dtype import AUTO, PackedDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedMethod(Method):
    """The method of a `CompressionConfig`, and the queries and sums that it needs.

    Args:
        after_lookahead: the method that compresses after the look-ahead. Some presets use another
            scorer there (`Preset.output_scorer`).
        decode, pieces: these groups of the settings.
        packed_dtype, decode_window, lookahead: resolved values of the settings.
        lookahead_window: number of output and prompt queries that score the prompt after a
            look-ahead.
    """

    after_lookahead: Method
    decode: DecodeSettings
    pieces: PieceSettings
    packed_dtype: PackedDtype
    decode_window: int
    lookahead: int
    lookahead_window: int

    def method_for(self, *, scored_by_output: bool) -> Method:
        """Return the method for a prompt that output tokens score, or that its own tokens score."""
        return self.after_lookahead if scored_by_output else self

    @property
    def min_window(self) -> int:
        """Return the fewest window queries that the method can score with."""
        return min_window(self.reads)

    @property
    def compresses_repeatedly(self) -> bool:
        """Return whether a request can be compressed more than once: pieces or a decode budget."""
        return self.decode.budget is not None or self.pieces.max_whole is not None

    @property
    def sums_output_attention(self) -> bool:
        """Return whether a decode budget is set and the scorer sums attention over all queries."""
        return self.decode.budget is not None and self.sums_attention

    @property
    def sums_attention(self) -> bool:
        """Return whether repeated compression needs the sum of attention over all queries."""
        return self.compresses_repeatedly and Reads.COLUMN_SUMS in self.reads

    @property
    def merges_repeatedly(self) -> bool:
        """Return whether the method merges tokens and can compress a request more than once."""
        return self.compresses_repeatedly and bool(self.merge)

    @property
    def probe_tokens(self) -> int:
        """Return the length in tokens of the probe that scores each piece of a prompt.

        The result is 0 if prompts are not compressed in pieces, if the method does not score by a
        window, or if it merges tokens. Merging would put dropped tokens into the probe's tokens,
        and these are not kept.
        """
        if self.pieces.max_whole is None or self.merge or not scores_by_window(self.reads):
            return 0
        return self.pieces.probe_first + self.pieces.probe

    @property
    def scoring_query_counts(self) -> tuple[int, int]:
        """Return the number of first and of last prompt tokens that score a piece, for reports.

        Both are 0 if a piece is scored with its own tokens, or not at all (in k4v3).
        """
        num_queries = self.probe_tokens if self.packed_dtype == AUTO else 0
        num_first = self.pieces.num_first_probe_tokens(num_queries)
        return num_first, num_queries - num_first

    @property
    def ring_window(self) -> int:
        """Return the number of last queries to store per request; 0 for none."""
        window = self.lookahead_window if self.lookahead else 0
        if self.decode.budget is not None:
            window = max(window, self.decode_window)
        return max(window, self.decode.interval) if self.sums_output_attention else window

    def num_allocator_queries(self, probe: int) -> int | None:
        """Return how many of a probe's last queries divide the budget among layers; None for all.

        The prompt's first tokens take no part. With their queries too, layers would keep fewer of
        the tokens that the last queries attend to.

        Args:
            probe: length of the probe in tokens.
        """
        num_last = probe - self.pieces.num_first_probe_tokens(probe)
        return num_last if self.min_window <= num_last < probe else None
