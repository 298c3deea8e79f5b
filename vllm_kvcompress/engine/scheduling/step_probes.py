"""Probe tokens of the step that is being scheduled."""


class StepProbes:
    """Number of probe tokens behind each request's chunk in this step.

    Probe tokens score the chunk. They do not belong to the request, but vLLM counts them as part of
    its chunk until the step is scheduled.
    """

    def __init__(self) -> None:
        self._num_tokens: dict[str, int] = {}

    def set(self, request_id: str, num_tokens: int) -> None:
        """Record the number of probe tokens of a request in this step, possibly 0."""
        self._num_tokens[request_id] = num_tokens

    def count(self, request_id: str) -> int:
        """Return the number of probe tokens of a request in this step."""
        return self._num_tokens.get(request_id, 0)

    def subtract(self, request_id: str, num_tokens: int) -> int:
        """Return vLLM's token count of a request without its probe tokens."""
        return num_tokens - self.count(request_id)

    def clear(self) -> None:
        """Forget all probes, once the step is scheduled."""
        self._num_tokens.clear()
