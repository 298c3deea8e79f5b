"""Score layers of different lengths a few at a time, as the engine's packer does."""

from vllm_kvcompress.methods.kept_slots import kept_slots as choose_slots
from vllm_kvcompress.methods.method import join_observations


def observe_layers(method, rows, query, window, at_once, sums=None, latest=None):
    """Return the scores ``[N, Hkv, W]`` of all layers, and their observations.

    Args:
        rows: paged layers.
        at_once: number of layers that are scored together.
        sums: attention that earlier steps added up, or None.
        latest: number of last queries that score separately; None if all queries score together.
    """
    observations, counts = [], []
    for start in range(0, len(rows), at_once):
        layers = slice(start, start + at_once)
        part_rows = rows.subset(layers)
        attention, by_output = None, latest is not None
        if query is not None:
            attention = method.attention(
                part_rows, query[layers], latest, scored_by_output=by_output
            )
        part_sums = None if sums is None else sums[layers]
        observations.append(method.observe(part_rows, window, attention, part_sums))
        counts.append(len(part_rows))
    observations = join_observations(observations, counts)
    return method.scores(observations), observations


def kept_slots(scores, rows, counts, window, block_size, max_layer_pages, selector, tail=0):
    """Return the slots that each layer keeps in its pages."""
    in_pages, width = counts.int() * block_size, max_layer_pages * block_size
    options = {"window": window, "tail": tail, "width": width, "selector": selector}
    return choose_slots(scores, rows.lengths, in_pages, **options)
