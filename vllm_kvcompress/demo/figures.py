"""Compare both servers' figures and outputs, and name losses and failures."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_kvcompress.demo.ask import Measured, Reply

NOISE = 1.02
"""Times that differ by less than this factor are called equal."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many output tokens of one request are equal on both servers.

    A token counts only if all tokens before it are equal: after the first different token, both
    outputs continue different texts.

    Args:
        before: whether all tokens before the compression are equal.
        equal: equal tokens after the compression started.
        tokens: tokens of vLLM alone after the compression started, up to the model's end of turn.
    """

    before: bool
    equal: int
    tokens: int


def agreement(off: Reply, on: Reply, end_of_turn: int) -> Agreement:
    """Return how many output tokens of `off`, from vLLM alone, are equal in `on`.

    Args:
        end_of_turn: the token that ends the model's turn.
    """
    length = len(turn(off, end_of_turn))
    uncompressed = min(1 + on.compressed.lookahead if on.compressed else 0, length)
    pairs = enumerate(zip(off.token_ids, on.token_ids, strict=False))
    alike = min(next((at for at, (one, other) in pairs if one != other), length), length)
    return Agreement(
        before=alike >= uncompressed,
        equal=max(alike - uncompressed, 0),
        tokens=length - uncompressed,
    )


def turn(reply: Reply, end_of_turn: int) -> tuple[int, ...]:
    """Return the output tokens before the model's end of turn."""
    ids = reply.token_ids
    return ids[: ids.index(end_of_turn)] if end_of_turn in ids else ids


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both servers' replies to the same prompts.

    Args:
        off: vLLM alone.
        on: the compressed server.
        agreements: one per prompt.
    """

    off: Measured
    on: Measured
    agreements: tuple[Agreement, ...]

    @property
    def equal(self) -> int:
        return sum(each.equal for each in self.agreements)

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.agreements)


def compare(off: Measured, on: Measured, end_of_turn: int) -> Comparison:
    pairs = zip(off.replies, on.replies, strict=True)
    return Comparison(off, on, tuple(agreement(*pair, end_of_turn) for pair in pairs))


def failures(one: Comparison, load: Comparison) -> list[str]:
    """Return why the demo failed: no compression, no freed blocks, or early different tokens."""
    found = []
    replies = [*one.on.replies, *load.on.replies]
    if uncompressed := sum(reply.compressed is None for reply in replies):
        found.append(
            f"{uncompressed} of {len(replies)} prompts were not compressed: the server's log has no"
            " kv-compress line for them. Are they shorter than --kv-min-prompt, or their outputs"
            " shorter than the look-ahead?"
        )
    if not min(one.off.last_blocks, one.on.last_blocks):
        found.append(
            "The KV blocks were not counted: a request ended before the demo read vLLM's gauge. Run"
            " the demo again when the machine is less busy."
        )
    elif one.on.last_blocks >= one.off.last_blocks:
        found.append("vLLM got no KV blocks back: its usage gauge shows no fewer blocks in use.")
    if not all(each.before for each in one.agreements):
        found.append(
            "A single request's output tokens differ before the compression: please report this."
        )
    return found


def losses(one: Comparison, load: Comparison, lost: Sequence[str]) -> list[str]:
    """Return every loss against vLLM alone that was seen, each with its reason.

    Args:
        one: the question, sent alone.
        load: the requests that were sent at once.
        lost: the facts that only the answer of vLLM alone has.
    """
    found = []
    (alone,), (compressed,) = one.off.replies, one.on.replies
    if lost:
        kept = compressed.compressed.kept_tokens if compressed.compressed else 0
        found.append(
            f"The answer lacks {' and '.join(lost)}: a layer kept {kept:.0f} of"
            f" {compressed.prompt_tokens} prompt tokens on average."
        )
    number = len(load.agreements)
    if different := sum(each.equal < each.tokens for each in load.agreements):
        found.append(
            f"{different} of {number} outputs change after the compression, which drops tokens."
        )
    if early := sum(not each.before for each in load.agreements):
        found.append(
            f"{early} of {number} outputs differ before the compression: other batches round"
            " differently."
        )
    if load.on.preemptions > load.off.preemptions:
        found.append(
            f"{load.on.preemptions} preemptions, not {load.off.preemptions}: more requests ran, and"
            " outputs are not compressed."
        )
    for what, off_s, on_s, reason in (
        (
            "A single request's first token",
            alone.first_token_s,
            compressed.first_token_s,
            "the plugin adds work to each step",
        ),
        (
            "A single request's output token",
            alone.token_s,
            compressed.token_s,
            "each layer reads its own pages",
        ),
        (
            "A single request",
            alone.end_s,
            compressed.end_s,
            f"its compression took {one.on.compression_s:.2f} s",
        ),
        (
            "A request among others, on average,",
            load.off.request_s,
            load.on.request_s,
            "requests that share a step end together",
        ),
        (
            "All requests",
            load.off.wall_s,
            load.on.wall_s,
            "compressing cost more than it saved",
        ),
    ):
        if on_s > off_s * NOISE:
            found.append(f"{what} took {on_s:.3g} s, not {off_s:.3g} s: {reason}.")
    return found
