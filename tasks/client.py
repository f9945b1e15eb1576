"""A process' client: who it is, its way to an owner, and where its outboxes are.

    with Client.connect(Settings.from_environ(os.environ)) as client: ...     # through the broker
    with Client.direct(ledger, state_dir) as client: ...                      # one program, no broker

It belongs to the process that made it. After a fork the child makes its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from ..config import Settings
from ..ledger import BUILTIN, Identity, Kind, Ledger, Registry
from ..ledger.canonical import canonical
from ..ledger.errors import ConfigurationError, PermissionDenied
from ..ledger.executions import Hold
from ..ledger.states import Status
from .application import make_app
from .keys import Keyring, Principal
from .liveness import own_identity
from .outbox import CAP_BYTES, Outbox
from .outbox_scope import Scope
from .owner import Owner
from .sender import Sender
from .stream import Credential, Stream
from .transports import BrokerTransport, DirectTransport
from .wire import Answer, Control, claim_proof

ANSWER_SECONDS = 60.0
Intercept = Callable[[list[Answer]], list[Answer]]
Fault = Callable[[str], None]


def _no_fault(_point: str) -> None:
    """Nothing happens."""


class Client:
    """What the executions of one process share."""

    def __init__(
        self,
        *,
        state_dir: Path,
        identity: Identity,
        resend_seconds: float = 2.0,
        outbox_bytes: int = CAP_BYTES,
        registry: Registry | None = None,
        fault: Fault = _no_fault,
    ) -> None:
        """Use `connect` or `direct`. `fault` is called with the name of each crash point that is reached."""
        self.state_dir, self.identity = state_dir, identity
        self.registry = registry or Registry(BUILTIN)
        self._resend_seconds, self._outbox_bytes = resend_seconds, outbox_bytes
        self._pid, self._fault = os.getpid(), fault
        self._intercept: Intercept | None = None
        self.sender: Sender
        self.principal: Principal
        self._transport: BrokerTransport | DirectTransport

    @classmethod
    def connect(cls, settings: Settings, *, intercept: Intercept | None = None) -> Self:
        """Return a client that reaches the owner through the broker.

        `intercept` sees every batch of answers first and returns those to take in: a fault test loses some.

        Raises:
            ConfigurationError: no broker, or no key for this principal.
        """
        principal = _own_key(settings)
        client = cls(
            state_dir=settings.state_dir,
            identity=own_identity(settings.host_id),
            resend_seconds=settings.resend_seconds,
            outbox_bytes=settings.outbox_bytes,
        )
        client._intercept = intercept
        app = make_app(settings)
        transport = BrokerTransport(app, principal, settings.owner_queue, client._receive)
        client._use(transport, threaded=True)
        return client

    @classmethod
    def direct(cls, ledger: Ledger, state_dir: Path, *, resend_seconds: float = 0.1, fault: Fault = _no_fault) -> Self:
        """Return a client that is its own owner, on a ledger in this process.

        Raises:
            Unavailable: the database cannot serve this now.
        """
        identity = own_identity()
        client = cls(
            state_dir=state_dir,
            identity=identity,
            resend_seconds=resend_seconds,
            registry=ledger.registry,
            fault=fault,
        )
        client._use(DirectTransport(ledger, identity), threaded=False)
        return client

    def beside(self, identity: Identity, *, fault: Fault = _no_fault) -> Client:
        """Return a client of another process, as far as the owner can tell, that shares this one's owner."""
        client = Client(
            state_dir=self.state_dir,
            identity=identity,
            resend_seconds=self._resend_seconds,
            registry=self.registry,
            fault=fault,
        )
        client._use(self._transport, threaded=False)
        return client

    @property
    def owner(self) -> Owner:
        """The owner in this process.

        Raises:
            ConfigurationError: the owner is at the other end of a broker.
        """
        if not isinstance(self._transport, DirectTransport):
            raise ConfigurationError("the owner is not in this process")
        return self._transport.owner

    def _use(self, transport: BrokerTransport | DirectTransport, *, threaded: bool) -> None:
        self._transport, self.principal = transport, transport.principal
        self.sender = Sender(transport, resend_seconds=self._resend_seconds, threaded=threaded, fault=self._fault)

    def _receive(self, answers: list[Answer]) -> None:
        self.sender.receive(self._intercept(answers) if self._intercept else answers)

    @property
    def forked(self) -> bool:
        """Whether this is a forked child of the process that made the client."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Refuse to work in a forked child.

        Raises:
            ConfigurationError: this client was made before a fork.
        """
        if self.forked:
            raise ConfigurationError("this client was made before a fork; make one in this process")

    def ask(self, kind: Control, body: dict[str, Any], *, within: float = ANSWER_SECONDS) -> dict[str, Any]:
        """Ask the owner and return its answer.

        Raises:
            TimeoutError: no answer within so many seconds.
            TenureError: what the owner answered.
        """
        self.check_process()
        return self.sender.ask(kind, body, within=within)

    def prove(self, kind: Control, hold: Hold, claim: str) -> dict[str, Any]:
        """Return the body of a control message about an execution that this process holds."""
        return {
            "epoch": hold.epoch,
            "execution": hold.execution_id,
            "session": hold.session_id,
            "generation": hold.generation,
            "proof": claim_proof(claim, kind, hold.execution_id, hold.epoch),
        }

    def open_stream(self, hold: Hold, credential: Credential) -> Stream:
        """Open the outbox of an execution and carry what it journals.

        Raises:
            PermissionDenied: the outbox is another scope's, or was made with another secret.
            ConfigurationError, OutboxCorrupt, Unavailable: it cannot be used.
        """
        outbox = Outbox.open(
            self.state_dir,
            Scope(hold.execution_id, hold.session_id, credential.profile),
            secret_digest=credential.secret_digest,
            generation=hold.generation,
            first_sequence=hold.last_sequence + 1,
            cap_bytes=self._outbox_bytes,
            fault=self._fault,
        )
        stream = Stream(outbox, hold, credential, resend_seconds=self._resend_seconds)
        self.sender.add(stream)
        return stream

    def encode(self, operation: str, payload: dict[str, Any]) -> str:
        """Return an operation's payload as it is journalled, once it is known that no owner will refuse its shape.

        Raises:
            InvalidParams: `detail` names the field.
        """
        known = self.registry.get(operation)
        text = canonical(payload)
        known.read(payload)
        return text

    def abandon(self) -> None:
        """Let go of everything as the end of the process would: nothing is sent, nothing is settled any more."""
        self.sender.abandon()

    def close(self) -> None:
        """Stop carrying and listening. What is journalled stays journalled."""
        if not self.forked:
            self.sender.close()
            self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _own_key(settings: Settings) -> Principal:
    try:
        return Keyring.load(settings.keys).get(settings.principal)
    except PermissionDenied as error:
        raise ConfigurationError(f"key file {settings.keys} has no principal {settings.principal!r}") from error


def hold_from_json(value: dict[str, Any]) -> Hold:
    """Rebuild a hold from an owner's answer."""
    return Hold(**value | {"kind": Kind(value["kind"]), "status": Status(value["status"])})
