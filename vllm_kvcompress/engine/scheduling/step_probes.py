"""The probes of the step that is being scheduled."""


class StepProbes:
    """Rows behind the chunks of this step that judge them: they are no tokens of their requests.

    vLLM counts them among a chunk's until the step is scheduled.
    """

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}

    def note(self, request_id: str, rows: int) -> None:
        """A request is scheduled with so many of them, which may be none."""
        self._rows[request_id] = rows

    def rows(self, request_id: str) -> int:
        """How many a request has in this step."""
        return self._rows.get(request_id, 0)

    def without(self, request_id: str, tokens: int) -> int:
        """A request's tokens once this step has run, of those that vLLM counts."""
        return tokens - self.rows(request_id)

    def clear(self) -> None:
        """The step is scheduled."""
        self._rows.clear()
