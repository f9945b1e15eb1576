"""The owner's Celery tasks: each hands its message to the owner of this process and sends the reply.

They take whatever arrives: a message that is not ours is refused by the owner, not by Celery's signature check.
What they return is seen in logs and in Flower, so it says how many, never what.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from celery import Celery, Task

from ..config import Settings
from ..ledger.errors import OwnerSuperseded, Unavailable
from .application import APPLY, CANARY, CONTROL, RECOVER
from .owner import Owner, Reply
from .ownership import Tenancy
from .replies import publish

logger = logging.getLogger(__name__)


def add_endpoints(app: Celery, settings: Settings, tenancy: Tenancy) -> None:
    """Give the application its owner tasks."""

    def endpoint(name: str, duty: Callable[[Owner, object], Any]) -> None:
        def run(_task: Task[Any, Any], /, *args: object, **_kwargs: object) -> Any:
            return _serve(app, tenancy, lambda owner: duty(owner, args[0] if args else None))

        app.task(bind=True, name=name, typing=False, ignore_result=True)(run)

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
