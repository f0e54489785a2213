"""A second thread for first stages: while somebody has the engine, those who have nothing yet need not wait for it.

In: what runs one of them and says whether there was one. Rung whenever somebody comes and the engine is taken; goes on until
nobody waits for a first stage. Only for engines that several threads may use at the same time. Knows nothing of stages.
"""

import threading
from collections.abc import Callable
from math import inf

from nestling.runtime.bell import Bell


class SecondThread:
    """`ring`, and it runs `one` after another until there is none."""

    def __init__(self, one: Callable[[], bool]) -> None:
        self.one, self.bell, self.closing = one, Bell(), False
        self.thread = threading.Thread(target=self.live, name="nestling-second", daemon=True)
        self.thread.start()

    def ring(self) -> None:
        self.bell.ring()

    def close(self) -> None:
        self.closing = True
        self.bell.ring()
        if self.thread is not threading.current_thread():
            self.thread.join()

    def live(self) -> None:
        while not self.closing:
            self.bell.wait(inf)
            while not self.closing and self.one():
                pass
