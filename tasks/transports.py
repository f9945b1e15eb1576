"""The two ways to an owner: through a broker, or straight into a ledger of the same process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import uuid4

from celery import Celery
from kombu.exceptions import OperationalError

from ..ledger import Identity, Ledger
from ..ledger.canonical import canonical, parse
from ..ledger.errors import OwnerSuperseded, TenureError, Unavailable
from . import wire
from .application import APPLY, CONTROL
from .keys import Keyring, Principal
from .outbox import Entry
from .owner import Owner, Reply
from .replies import Listener
from .stream import Run
from .wire import Answer, Control

logger = logging.getLogger(__name__)

_READY_SECONDS = 5.0


def control_message(
    kind: Control, body: dict[str, Any], request: str, *, principal: Principal, reply_to: str
) -> dict[str, Any]:
    """Return the message of a control request; a secret's digest in it travels sealed."""
    if "secret" in body:
        body = body | {"secret": principal.seal(body["secret"], context=body["execution"])}
    return wire.control(kind, body, principal=principal, request=request, reply_to=reply_to)


def run_message(run: Run, *, principal: Principal, reply_to: str) -> dict[str, Any]:
    """Return the message of a run."""
    hold = run.hold
    return wire.apply(
        epoch=hold.epoch,
        execution=hold.execution_id,
        session=hold.session_id,
        generation=hold.generation,
        first=run.entries[0].sequence,
        operations=[_travelling(entry, principal, hold.execution_id) for entry in run.entries],
        claim=run.claim,
        principal=principal,
        request=run.request,
        reply_to=reply_to,
    )


def _travelling(entry: Entry, principal: Principal, execution: str) -> tuple[str, str]:
    """Seal the secret's digest of a reservation: who reads the broker must not be able to hold the child."""
    if entry.operation != "child.reserve":
        return entry.operation, entry.payload
    payload = parse(entry.payload)
    token = principal.seal(payload.pop("secret_digest"), context=execution)
    return entry.operation, canonical(payload | {"sealed": token})


class DirectTransport:
    """An owner in the same process: one program, no broker. It begins an epoch and recovers."""

    def __init__(self, ledger: Ledger, here: Identity) -> None:
        self.principal = Principal.of("local", os.urandom(32))
        self._reply_to = f"tenure.reply.{uuid4().hex}"
        epoch = ledger.begin_epoch(f"direct:{here.pid}")
        keyring = Keyring({self.principal.name: self.principal})
        self.owner = Owner(ledger, keyring, here, epoch, owner_pid=0)
        self.owner.recover(unknown_grace=None)

    def control(self, kind: Control, body: dict[str, Any], request: str) -> list[Answer]:
        """Have the owner answer."""
        message = control_message(kind, body, request, principal=self.principal, reply_to=self._reply_to)
        return self._answers(self.owner.control(message))

    def run(self, run: Run) -> list[Answer]:
        """Have the owner apply."""
        message = run_message(run, principal=self.principal, reply_to=self._reply_to)
        return self._answers(self.owner.apply(message))

    def _answers(self, reply: Reply | None) -> list[Answer]:
        assert reply is not None  # the message is our own
        return wire.read_reply(reply.message, self.principal)[1]

    def close(self) -> None:
        """Record that this owner leaves in good order, unless a newer one has replaced it."""
        with suppress(OwnerSuperseded):
            self.owner.ledger.release(self.owner.epoch)


class BrokerTransport:
    """The owner at the other end of a broker. Its answers come over this process' reply queue."""

    def __init__(
        self, app: Celery, principal: Principal, owner_queue: str, deliver: Callable[[list[Answer]], None]
    ) -> None:
        self.principal = principal
        self._app, self._owner_queue, self._deliver = app, owner_queue, deliver
        self._reply_to = f"tenure.reply.{uuid4().hex}"
        self._listener = Listener(app.connection_for_read, self._reply_to, self._receive)

    def control(self, kind: Control, body: dict[str, Any], request: str) -> list[Answer]:
        """Publish; the answer comes later.

        Raises:
            Unavailable: the broker does not take it now.
        """
        message = control_message(kind, body, request, principal=self.principal, reply_to=self._reply_to)
        execution = body.get("execution", "")
        return self._publish(CONTROL, f"{kind}:{execution}:{uuid4().hex[:8]}", message)

    def run(self, run: Run) -> list[Answer]:
        """Publish; the answers come later.

        Raises:
            Unavailable: the broker does not take it now.
        """
        first, last = run.entries[0].sequence, run.entries[-1].sequence
        # Readable, and new for every send: a result backend answers a reused id with the old result.
        name = f"{run.hold.execution_id}:{first}-{last}@{run.hold.epoch}:{uuid4().hex[:8]}"
        return self._publish(APPLY, name, run_message(run, principal=self.principal, reply_to=self._reply_to))

    def _publish(self, task: str, task_id: str, message: dict[str, Any]) -> list[Answer]:
        if not self._listener.listening.wait(_READY_SECONDS):
            raise Unavailable("the broker is away: no reply queue yet")
        try:
            self._app.send_task(
                task,
                args=[message],
                task_id=task_id,
                queue=self._owner_queue,
                ignore_result=True,
                retry=False,
                argsrepr=f"<{len(message.get('run') or message.get('body') or '')} characters>",
                kwargsrepr="{}",
            )
        except OperationalError as error:
            raise Unavailable(f"the broker is away: {error}") from error
        return []

    def _receive(self, body: object) -> None:
        try:
            _epoch, answers = wire.read_reply(body, self.principal)
        except TenureError as error:
            logger.warning("a reply that is not ours was left aside: %s", error.explain())
            return
        self._deliver(answers)

    def close(self) -> None:
        """Stop listening."""
        self._listener.stop()
