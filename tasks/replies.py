"""Answers on their way back: after the commit, over one reply queue of each worker process, as values.

A reply is worth nothing by itself. The ledger is the truth; a reply that is lost costs a re-send.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from celery import Celery
from kombu import Connection, Producer, Queue
from kombu.exceptions import OperationalError

from .owner import Reply

logger = logging.getLogger(__name__)

ABANDONED_SECONDS = 600  # after which a reply queue that nobody reads is gone
_POLL_SECONDS = 1.0  # how soon a listener notices that it is to stop


def reply_queue(name: str) -> Queue:
    """Return the queue of that name: on the default exchange, gone some time after its reader."""
    return Queue(name, durable=True, expires=ABANDONED_SECONDS)


def publish(app: Celery, reply: Reply) -> None:
    """Send a reply; if the broker does not take it, log that and let the worker ask again."""
    try:
        with app.producer_or_acquire() as producer:
            _send(producer, reply)
    except OperationalError as error:
        logger.warning("a reply was not sent, its worker will ask again: %s", error)


def _send(producer: Producer, reply: Reply) -> None:
    connection: Any = producer.connection
    try:
        producer.publish(reply.message, routing_key=reply.reply_to, exchange="", serializer="json", retry=False)
        _expire(producer, reply.reply_to)
    except _faults(connection) as error:
        # kombu gives a failure to connect its own form, the loss of a connection the transport's.
        raise OperationalError(f"{type(error).__name__}: {error}") from error


def _faults(connection: Connection) -> tuple[type[BaseException], ...]:
    """Return what the transport raises when its broker is away, or refuses."""
    recoverable = (*connection.recoverable_connection_errors, *connection.recoverable_channel_errors)
    return (*recoverable, *connection.connection_errors, *connection.channel_errors)


def _expire(producer: Producer, queue: str) -> None:
    """Redis knows no expiring queues: give the list itself a time to live."""
    channel: Any = producer.channel
    if producer.connection is not None and producer.connection.transport.driver_type == "redis":
        channel.client.pexpire(queue, ABANDONED_SECONDS * 1000)  # kombu puts its prefix before this one's key only


def _leave_aside(_message: object, error: Exception) -> None:
    logger.warning("a reply that cannot be read was left aside: %s", type(error).__name__)


class Listener:
    """Reads one reply queue in a thread of its own and hands each message on, until it is stopped."""

    def __init__(self, connect: Callable[[], Connection], queue: str, deliver: Callable[[Any], None]) -> None:
        self._connect, self._queue, self._deliver = connect, reply_queue(queue), deliver
        self._stopping = threading.Event()
        self.listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tenure-replies", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopping.set()
        self._thread.join(timeout=5)  # in a call to a silent broker it ends later, by itself

    def _run(self) -> None:
        pause = 0.1
        while not self._stopping.is_set():
            connection = self._connect()
            try:
                self._listen(connection)
                pause = 0.1
            except _faults(connection) as error:
                logger.info("no replies for now, the broker is away: %s", type(error).__name__)
                self._stopping.wait(pause)
                pause = min(pause * 2, 5.0)
            finally:
                self.listening.clear()
                connection.release()

    def _listen(self, connection: Connection) -> None:
        channel = connection.channel()
        with connection.Consumer(
            [self._queue],
            channel=channel,
            callbacks=[self._receive],
            on_decode_error=_leave_aside,
            accept=["json"],
            no_ack=True,
        ):
            self.listening.set()
            while not self._stopping.is_set():
                try:
                    connection.drain_events(timeout=_POLL_SECONDS)
                except TimeoutError:
                    connection.heartbeat_check()

    def _receive(self, body: Any, _message: object) -> None:
        self._deliver(body)
