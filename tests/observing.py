"""Rows of different lengths, scored a few at a time as the engine's packer scores them."""

from vllm_kvcompress.methods.kept_slots import kept_slots as choose


def observe_rows(method, rows, query, window, at_once, sums=None, latest=None):
    """Scores ``[N, Hkv, W]`` of all rows, and what each leaves behind.

    Args:
        latest: the last of the queries that judge apart; None where all judge together.
    """
    observed = []
    for start in range(0, len(rows), at_once):
        part = slice(start, start + at_once)
        own = rows.some(part)
        attention = (
            None
            if query is None
            else method.attention(own, query[part], latest, scored_by_output=latest is not None)
        )
        paid = None if sums is None else sums[part]
        observed += method.observe(own, window, attention, paid)
    return method.scores(observed), observed


def kept_slots(scores, rows, counts, window, block_size, most_pages, selector, tail=0):
    """Slots that each row keeps in its pages."""
    return choose(
        scores,
        rows.lengths,
        counts,
        window=window,
        tail=tail,
        block_size=block_size,
        most_pages=most_pages,
        selector=selector,
    )
