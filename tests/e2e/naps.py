"""How one process waits for the word of another. A site imports this: it imports nothing itself."""

MILLISECONDS = 2


def take_naps(condition: type) -> None:
    """Let vLLM's `SpinCondition` sleep at once, and look again at least every few milliseconds.

    It would ask again and again for a second, and take the core that the other one needs. Then it
    would sleep until it is told, and nobody tells it where the word came before it slept.
    """
    wait = condition.wait

    def napping(self, timeout_ms: int | None = None) -> None:
        self.busy_loop_s = 0
        wait(self, MILLISECONDS if timeout_ms is None else min(timeout_ms, MILLISECONDS))

    condition.wait = napping
