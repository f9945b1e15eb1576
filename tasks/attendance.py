"""A worker of the prefork pool notices at once that one of its processes has died.

Where the pool's own signal of a death does not arrive, Celery looks every five seconds. So long the worker takes the
dead process for busy, and fetches no order for it.
"""

from __future__ import annotations

from typing import Any

from celery import Celery, bootsteps

LOOK_SECONDS = 0.2


class Attendance(bootsteps.StartStopStep):
    """Looks after the pool's processes."""

    requires = ("celery.worker.components:Pool",)

    def register_with_event_loop(self, worker: Any, hub: Any) -> None:
        """Look often; this asks the system about the pool's own processes only."""
        if worker.pool_cls.__module__ == "celery.concurrency.prefork":
            hub.call_repeatedly(LOOK_SECONDS, worker.pool.maintain_pool)


def attend(app: Celery) -> None:
    """Have this application's workers look after their pool."""
    app.steps["worker"].add(Attendance)
