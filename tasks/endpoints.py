"""The owner's Celery tasks: each hands its message to the owner of this process and sends the reply.

They take whatever arrives: a message that is not ours is refused by the owner, not by Celery's signature check.
What they return is seen in logs and in Flower, so it says how many, never what.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from celery import Celery, Task
from celery.worker.request import Request
from kombu.transport.virtual import QoS

from ..config import Settings
from ..ledger.errors import OwnerSuperseded, Unavailable
from .application import APPLY, CANARY, CONTROL, RECOVER
from .owner import Owner, Reply
from .ownership import Tenancy
from .replies import publish

logger = logging.getLogger(__name__)


class _Request(Request):
    """A message that counts as done here although the broker could not be told, as while it does not answer.

    The broker gives it again later, and its receipt answers. kombu would count it as in work for ever: with a
    window of one message the owner would stay connected and consume nothing.
    """

    def acknowledge(self) -> None:
        """Tell the broker; then take it out of the window in any case."""
        super().acknowledge()
        qos, tag = getattr(self.message.channel, "qos", None), self.message.delivery_tag
        if isinstance(qos, QoS):  # of a transport on which kombu does the counting
            with suppress(KeyError):  # it is out already
                qos.get(tag)
                QoS.ack(qos, tag)


def add_endpoints(app: Celery, settings: Settings, tenancy: Tenancy) -> None:
    """Give the application its owner tasks."""

    def endpoint(name: str, duty: Callable[[Owner, object], Any]) -> None:
        def run(_task: Task[Any, Any], /, *args: object, **_kwargs: object) -> Any:
            return _serve(app, tenancy, lambda owner: duty(owner, args[0] if args else None))

        # Shared, it would be every other application's too, and that one's would be ours.
        app.task(bind=True, shared=False, name=name, typing=False, ignore_result=True, Request=_Request)(run)

    grace = timedelta(seconds=settings.unknown_grace_seconds)
    endpoint(APPLY, lambda owner, value: owner.apply(value))
    endpoint(CONTROL, lambda owner, value: owner.control(value))
    endpoint(RECOVER, lambda owner, _value: owner.recover(unknown_grace=grace))
    endpoint(CANARY, lambda _owner, _value: None)


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
