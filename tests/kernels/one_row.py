"""The ops on rows, called for one row: arguments and results have no row axis."""

from kvcompress_kernels.key_cosines import key_cosines_of_rows
from kvcompress_kernels.lag_scores import lag_scores_of_rows
from kvcompress_kernels.value_norms import value_norms_of_rows
from kvcompress_kernels.value_scores import value_scores_of_rows
from kvcompress_kernels.window_scores import WindowScores, window_scores_of_rows


def scores_of_row(scores, index):
    """Return one row of `WindowScores`."""
    return WindowScores(*(None if x is None else x[index] for x in scores))


def window_scores(query, key_pages, pages, tokens, scale, *, sinks=None, **options):
    sinks = None if sinks is None else sinks[None]
    arguments = query[None], key_pages, pages[None], tokens, scale
    return scores_of_row(window_scores_of_rows(*arguments, sinks=sinks, **options), 0)


def value_scores(weights, value_pages, pages, tokens, **options):
    return value_scores_of_rows(weights[None], value_pages, pages[None], tokens, **options)[0]


def value_norms(value_pages, pages, tokens):
    return value_norms_of_rows(value_pages, pages[None], tokens)[0]


def key_cosines(key_pages, pages, tokens):
    return key_cosines_of_rows(key_pages, pages[None], tokens)[0]


def lag_scores(key_pages, value_pages, pages, tokens, **options):
    return lag_scores_of_rows(key_pages, value_pages, pages[None], tokens, **options)[0]
