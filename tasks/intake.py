"""How an owner takes messages in and lets them go: where one message would keep Celery's consumer from the next."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from celery.worker import request
from celery.worker.consumer import Consumer
from kombu.transport.virtual import QoS

logger = logging.getLogger(__name__)

_MALFORMED = (AttributeError, LookupError, TypeError, ValueError)


class Intake(Consumer):
    """Throws away a message whose form Celery does not expect, as one without an id.

    Celery would take it for the loss of the connection, put it back in front and meet it again, for ever.
    """

    connection_errors: tuple[type[Exception], ...]

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], None]:
        """Return what each message is given to."""
        handle = super().create_task_handler(*args, **kwargs)

        def take(message: Any) -> None:
            try:
                handle(message)
            except _MALFORMED as error:
                logger.warning("threw away a message that is not Celery's: %s", type(error).__name__)
                message.reject_log_error(logger, self.connection_errors)

        return take


class Request(request.Request):
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
