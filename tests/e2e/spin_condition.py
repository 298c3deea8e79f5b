"""Replace vLLM's busy wait between processes with short sleeps.

A ``sitecustomize.py`` imports this module, so it must not import anything.
"""

MILLISECONDS = 2


def sleep_instead_of_spinning(condition: type) -> None:
    """Let vLLM's `SpinCondition` sleep immediately and poll again every few milliseconds.

    By default it spins for a second on a core that the other process needs. Then it sleeps until it
    is notified, and misses a notification that came before it slept.
    """
    wait = condition.wait

    def wait_briefly(self, timeout_ms: int | None = None) -> None:
        self.busy_loop_s = 0
        wait(self, MILLISECONDS if timeout_ms is None else min(timeout_ms, MILLISECONDS))

    condition.wait = wait_briefly
