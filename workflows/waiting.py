"""Looking again and again for what another process will have done, less often the longer it takes."""

from __future__ import annotations

import time

FIRST_LOOK_SECONDS = 0.02
MAX_LOOK_SECONDS = 1.0


class Pauses:
    """The pauses between looks: each twice as long as the one before, up to a second."""

    def __init__(self) -> None:
        self.next = FIRST_LOOK_SECONDS

    def take(self) -> None:
        """Wait for as long as `next` says."""
        time.sleep(self.next)
        self.next = min(self.next * 2, MAX_LOOK_SECONDS)
