"""The options of a request, carried to the engine core in its sampling parameters.

The API server (or the `LLM` process) has checked them. It sends the choices, which each process
resolves with its own engine settings, and the spans, which only the server can find. If a client
sends this key itself, the server overwrites its value.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.sampling_params import SamplingParams

from vllm_kvcompress.errors import OverrideError, shorten
from vllm_kvcompress.methods.spans import Spans
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.request_keys import OPTIONS
from vllm_kvcompress.settings.request_options import RequestChoices, RequestOptions


def attach_options(params: SamplingParams, options: RequestOptions) -> None:
    """Write the options into the request's sampling parameters, in place.

    Args:
        params: must belong to this request alone.
        options: checked options, with the spans of the prompt.
    """
    message = {
        "choice": list(options.choice),
        "spans": [list(span) for span in options.spans],
    }
    params.extra_args = {**(params.extra_args or {}), OPTIONS: message}


def options_of(settings: CompressionConfig | None, params: SamplingParams | None) -> RequestOptions:
    """Return the options of a request, without its protection, which the spans replace.

    Args:
        settings: settings of this engine; None if it runs without compression.
        params: sampling parameters of the request; None if it has none.

    Raises:
        OverrideError: the request did not come through a front end that checks it
            (`frontend.api`), and its own choices are wrong or not allowed.
    """
    message = _message(params)
    if settings is None or message is None:
        return RequestOptions.parse(settings, params.extra_args if params else None)
    try:
        choice, spans = RequestChoices(*message["choice"]), _parse_spans(message["spans"])
        hash(choice)
    except (KeyError, TypeError, ValueError) as e:
        raise OverrideError.invalid(
            f"{OPTIONS} must be as the API server writes it, got {shorten(message)}; send the"
            " request through the server, or leave the key out"
        ) from e
    return RequestOptions(
        choice=choice, settings=choice.resolve(settings), spans=spans, has_spans=True
    )


def _message(params: SamplingParams | None) -> Mapping[str, Any] | None:
    """Return what `attach_options` has written; None if the request has no options."""
    extra_args = None if params is None else params.extra_args
    message = (extra_args or {}).get(OPTIONS)
    return message if isinstance(message, Mapping) else None


def _parse_spans(raw_spans: Iterable[Sequence[int]]) -> Spans:
    return tuple((int(start), int(stop)) for start, stop in raw_spans)
