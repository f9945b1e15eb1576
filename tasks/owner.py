"""The owner's duties, one call each, without a queue: read a message, apply it, return the reply.

Nothing a message holds may kill the owner or stop the next message. What cannot be understood or proved is
refused; what the database cannot serve now is answered `unavailable`, and the worker sends it again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from ..ledger import Address, Identity, Ledger, Request, reads
from ..ledger.errors import (
    Action,
    InvalidParams,
    OwnerSuperseded,
    TenureError,
    Unavailable,
    to_wire,
)
from . import wire
from .desk import Desk
from .keys import Keyring, Principal
from .orders import Order
from .recovery import deaths_on_this_host, silent_hosts
from .wire import Answer, ApplyMessage

logger = logging.getLogger(__name__)

CAREFUL_SECONDS = 120.0  # after a crash, for how long attempts are counted before they are made


@dataclass(frozen=True, slots=True)
class Reply:
    """What to send back, and where."""

    reply_to: str
    message: dict[str, Any]


class Owner:
    """One epoch's owner: the only one whose writes the ledger takes."""

    def __init__(
        self,
        ledger: Ledger,
        keyring: Keyring,
        here: Identity,
        epoch: int,
        *,
        owner_pid: int | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledger, self.keyring, self.here, self.epoch = ledger, keyring, here, epoch
        # A worker in the owner's own process is refused, unless the two are one program (`owner_pid` 0).
        self.desk = Desk(self, here.pid if owner_pid is None else owner_pid)
        self.send: Callable[[list[Order]], list[str]] = lambda orders: [order.request for order in orders]
        self.watch: Callable[[list[Identity]], None] = lambda _identities: None
        self._monotonic = monotonic
        # A worker that knows nothing of the crash sends again what caused it, so this owner counts first.
        crashed = ledger.predecessor_crashed(epoch)
        self._careful_until = monotonic() + CAREFUL_SECONDS if crashed else float("-inf")

    @property
    def careful(self) -> bool:
        """Whether attempts are counted before they are made."""
        return self._monotonic() < self._careful_until

    def apply(self, value: object) -> Reply | None:
        """Apply a run of operations, one after the other, up to the first that is not answered by a receipt.

        Raises:
            OwnerSuperseded: a newer epoch has begun; this process must leave.
        """
        try:
            message = wire.read_apply(value)
            principal = self.keyring.get(message.principal)
            wire.verify_run(message, principal)
        except TenureError as error:
            _refuse(value, error)
            return None
        answers = self._run(message, principal)
        return Reply(message.reply_to, wire.reply(self.epoch, answers, principal=principal))

    def _run(self, message: ApplyMessage, principal: Principal) -> list[Answer]:
        answers: list[Answer] = []
        delegated = False
        address = Address(message.epoch, message.execution, message.session, message.generation)
        proof = wire.RunProof.of(message)
        sequence = message.first
        try:
            for name, payload in wire.read_run(message):
                opened = _unsealed(name, payload, principal, message.execution)
                request = Request(address, sequence, name, opened, proof)
                receipt = self.ledger.apply(self.epoch, request, careful=self.careful)
                delegated |= name == "child.reserve"
                answers.append(Answer(receipt.result, None, message.execution, sequence, message.request))
                sequence += 1
        except OwnerSuperseded:
            raise
        except TenureError as error:
            logger.info("%s:%d: %s", message.execution, sequence, error.explain())
            answers.append(Answer(None, self._told(error), message.execution, sequence, message.request))
        if delegated:
            self._send_due_in_time()
        return answers

    def control(self, value: object) -> Reply | None:
        """Answer a control message.

        Raises:
            OwnerSuperseded: a newer epoch has begun; this process must leave.
        """
        try:
            message = wire.read_control(value)
            principal = self.keyring.get(message.principal)
            wire.verify_control(message, principal)
        except TenureError as error:
            _refuse(value, error)
            return None
        try:
            answer = Answer(self.desk.answer(message, principal), request=message.request)
        except OwnerSuperseded:
            raise
        except TenureError as error:
            logger.info("%s: %s", message.control, error.explain())
            answer = Answer(None, self._told(error), request=message.request)
        return Reply(message.reply_to, wire.reply(self.epoch, [answer], principal=principal))

    def _told(self, error: TenureError) -> dict[str, Any]:
        """Return an error as it is answered. One that has its reader give up is for the current owner to tell.

        Raises:
            OwnerSuperseded: this is not it.
        """
        try:
            if error.action is Action.NEVER:
                with self.ledger.transaction(self.epoch):
                    pass
        except Unavailable as now:
            return to_wire(now)
        return to_wire(error)

    def recover(self, *, unknown_grace: timedelta | None, retention: timedelta | None = None) -> dict[str, Any]:
        """Run one recovery pass; returns the report. See `ledger.recovery.recover` for the two spans.

        Raises:
            OwnerSuperseded: a newer epoch has begun; this process must leave.
            Unavailable: the database cannot serve this now.
        """
        deaths = deaths_on_this_host(self.ledger, self.here)
        report = self.ledger.recover(self.epoch, deaths=deaths, unknown_grace=unknown_grace, retention=retention)
        self.send_due()
        return report.as_json()

    def bury(self, identity: Identity, evidence: str) -> None:
        """Settle what a process held that is proven gone, and have its workflows run on elsewhere.

        Raises:
            OwnerSuperseded, Unavailable: as `recover`.
        """
        with self.ledger.read() as connection:
            held = reads.held_on(connection, identity.host)
        deaths = [replace(death, evidence=evidence) for death in held if death.identity == identity]
        if deaths:
            logger.info("process %d of host %s is gone (%s)", identity.pid, identity.host, evidence)
            self.ledger.recover(self.epoch, deaths=deaths)
            self.send_due()

    def bury_silent_hosts(self, *, lease_seconds: float) -> None:
        """Do so for the processes of hosts whose probe has been silent for a lease beyond its own."""
        for identity in silent_hosts(self.ledger, lease_seconds=lease_seconds):
            self.bury(identity, "host_silent")

    def _send_due_in_time(self) -> None:
        """Send what is due, or leave it to the next recovery: what was applied has to be answered first."""
        try:
            self.send_due()
        except Unavailable as error:
            logger.warning("orders are not sent yet: %s", error.explain())

    def send_due(self) -> None:
        """Send the workflows that are due to the work queue; what the broker does not take is due again.

        Raises:
            OwnerSuperseded, Unavailable: as `recover`.
        """
        due = self.ledger.take_due(self.epoch)
        if due and (left := self.send([Order.of(one, self.epoch) for one in due])):
            self.ledger.not_sent(self.epoch, left)


def _unsealed(name: str, payload: Any, principal: Principal, execution: str) -> Any:
    """Open the secret's digest of a reservation, which travels sealed."""
    if name != "child.reserve" or not isinstance(payload, dict) or "sealed" not in payload:
        return payload
    token = payload["sealed"]
    if not isinstance(token, str):
        raise InvalidParams("child.reserve: sealed is text")
    rest = {key: value for key, value in payload.items() if key != "sealed"}
    return rest | {"secret_digest": principal.unseal(token, context=execution)}


def _refuse(value: object, error: TenureError) -> None:
    """Refuse what is not ours, or not provably from whom it says: once in the log, sizes only."""
    texts = [item for item in value.values() if isinstance(item, str)] if isinstance(value, dict) else []
    logger.warning("refused a message with %d characters of text: %s", sum(map(len, texts)), error.explain())
