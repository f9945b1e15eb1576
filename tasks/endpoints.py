"""The owner's Celery tasks: each hands its message to the owner of this process and sends the reply.

They take whatever arrives: a message that is not ours is refused by the owner, not by Celery's signature check.
What they return is seen in logs and in Flower, so it says how many, never what.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

from celery import Celery, Task
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError

from ..config import Settings
from ..ledger.errors import OwnerSuperseded, Unavailable
from .application import APPLY, CANARY, CONTROL, RECOVER
from .intake import Request
from .orders import Order
from .owner import Owner, Reply
from .ownership import Tenancy
from .replies import publish

logger = logging.getLogger(__name__)


def add_endpoints(app: Celery, settings: Settings, tenancy: Tenancy) -> None:
    """Give the application its owner tasks."""

    def endpoint(name: str, duty: Callable[[Owner, object], Any]) -> None:
        def run(_task: Task[Any, Any], /, *args: object, **_kwargs: object) -> Any:
            return _serve(app, tenancy, lambda owner: duty(owner, args[0] if args else None))

        # Shared, it would be every other application's too, and that one's would be ours.
        app.task(bind=True, shared=False, name=name, typing=False, ignore_result=True, Request=Request)(run)

    tenancy.send = order_sender(app, settings)
    grace = timedelta(seconds=settings.unknown_grace_seconds)
    retention = timedelta(days=settings.retention_days) if settings.retention_days else None
    endpoint(APPLY, lambda owner, value: owner.apply(value))
    endpoint(CONTROL, lambda owner, value: owner.control(value))
    endpoint(RECOVER, lambda owner, _value: owner.recover(unknown_grace=grace, retention=retention))
    endpoint(CANARY, lambda _owner, _value: None)


def order_sender(app: Celery, settings: Settings) -> Callable[[list[Order]], list[str]]:
    """Return what sends orders to the work queue, and returns the requests that the broker did not take."""

    def send(orders: list[Order]) -> list[str]:
        left: list[str] = []
        for order in orders:
            try:
                queue: Any = _queue(order.queue or settings.work_queue)  # the object: it need not be declared here
                app.send_task(
                    order.workflow,
                    kwargs={"order": order.to_json()},
                    task_id=f"{order.execution}:{uuid4().hex[:8]}",
                    queue=queue,
                    ignore_result=True,
                    retry=False,
                    kwargsrepr=f"<{order.request}>",
                )
            except OperationalError as error:
                logger.warning("request %s was not sent, it will be again: %s", order.request, type(error).__name__)
                left.append(order.request)
        return left

    return send


def _queue(name: str) -> Queue:
    return Queue(name, Exchange(name), routing_key=name)


def _serve(app: Celery, tenancy: Tenancy, duty: Callable[[Owner], Any]) -> str:
    tenancy.consumed()
    try:
        answer = duty(tenancy.owner)
    except OwnerSuperseded as error:
        tenancy.leave(error.explain())
    except Unavailable as error:
        logger.warning("%s", error.explain())
        return "unavailable"
    if isinstance(answer, Reply):
        publish(app, answer)
        return "answered"
    return "done"
