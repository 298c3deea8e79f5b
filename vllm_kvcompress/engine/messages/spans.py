"""What of a request's prompt is protected, in its sampling parameters' extra arguments.

The API server, or the process of `LLM`, finds it and puts it there. A client cannot: whatever it
sends under this name is replaced.
"""

from vllm.sampling_params import SamplingParams

from vllm_kvcompress.methods.spans import Spans

_KEY = "kvcompress_spans"


def attach_spans(params: SamplingParams, spans: Spans) -> None:
    """Send the protected spans with a request, whose own parameters these are."""
    others = {key: value for key, value in (params.extra_args or {}).items() if key != _KEY}
    if spans:
        others[_KEY] = [list(span) for span in spans]
    if others or params.extra_args:
        params.extra_args = others or None


def spans_of(params: SamplingParams | None) -> Spans:
    """The protected spans that came with a request."""
    extra_args = None if params is None else params.extra_args
    found = (extra_args or {}).get(_KEY, ())
    return tuple((int(start), int(stop)) for start, stop in found)
