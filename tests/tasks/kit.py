"""What the tests of the owner and of the worker's side work with, without a broker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from kombu.utils import json as kombu_json
from sqlalchemy import Engine, event

from tenure.ledger import Hold, Identity, Ledger, secret_digest
from tenure.ledger.canonical import canonical, parse
from tenure.ledger.errors import Unavailable
from tenure.ledger.reads import transcript
from tenure.tasks import wire
from tenure.tasks.client import hold_from_json
from tenure.tasks.keys import Capability, Keyring, Principal
from tenure.tasks.liveness import own_identity
from tenure.tasks.outbox import Entry, Outbox
from tenure.tasks.outbox_scope import Scope
from tenure.tasks.owner import Owner, Reply
from tenure.tasks.stream import Credential, Run, Stream
from tenure.tasks.transports import control_message, run_message
from tenure.tasks.wire import Answer, Control, claim_proof

HERE = own_identity()
ELSEWHERE = replace(HERE, host="another-host", pid=7)  # nobody here can tell whether it lives
REPLY_TO = f"tenure.reply.{'0' * 32}"
ALICE = Principal.of("alice", b"a" * 32)
BOB = Principal.of("bob", b"b" * 32, frozenset({Capability.ADOPT}))
KEYRING = Keyring({"alice": ALICE, "bob": BOB})
_names = count(1)


def quick(engine: Engine) -> None:
    """Have SQLite wait for no disk, where no test pulls a plug."""
    engine.dispose()  # of connections that have been made already
    event.listen(engine, "connect", lambda made, _record: made.execute("PRAGMA synchronous = OFF"))


@contextmanager
def open_ledger(url: str, **options: Any) -> Iterator[Ledger]:
    """Open a ledger, a quick one where it is on SQLite."""
    with Ledger.open(url, **options) as ledger:
        if ledger.store.dialect == "sqlite":
            quick(ledger.store.engine)
        yield ledger


class SettableMonotonic:
    """A monotonic clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def through_kombu(message: object) -> Any:
    """Return a message as it arrives: written and read by kombu's own JSON."""
    return kombu_json.loads(kombu_json.dumps(message))


def say(*texts: str) -> dict[str, Any]:
    """Return the payload of an append."""
    return {"messages": [{"role": "user", "content": text} for text in texts]}


def said(ledger: Ledger, session_id: str) -> list[Any]:
    """Return what a session's transcript says."""
    with ledger.read() as connection:
        return [message["content"] for message in transcript(connection, session_id)]


def entry(sequence: int, operation: str, payload: dict[str, Any]) -> Entry:
    return Entry(sequence, operation, canonical(payload))


@dataclass
class Holder:
    """A worker without a sender: what it holds, and how it proves it."""

    hold: Hold
    secret: str
    identity: Identity = HERE
    principal: Principal = ALICE

    @property
    def credential(self) -> Credential:
        return Credential("default", self.principal.name, self.identity, secret_digest(self.secret))

    def message(self, *operations: tuple[str, Any], first: int = 1, request: str = "tag", **fences: Any) -> Any:
        """Return the message of a run; `fences` replace fields of the hold."""
        claim = self.credential.claim(self.hold)  # of what it holds, whatever it pretends
        entries = [entry(number, *operation) for number, operation in enumerate(operations, first)]
        run = Run(replace(self.hold, **fences), claim, request, entries)
        return run_message(run, principal=self.principal, reply_to=REPLY_TO)

    def proved(self, kind: Control, *, epoch: int | None = None) -> dict[str, Any]:
        """Return the body of a control message about this hold."""
        hold = self.hold
        number = hold.epoch if epoch is None else epoch
        return {
            "epoch": number,
            "execution": hold.execution_id,
            "session": hold.session_id,
            "generation": hold.generation,
            "proof": claim_proof(self.credential.claim(hold), kind, hold.execution_id, number),
        }

    def attachment(self, identity: Identity) -> dict[str, Any]:
        """Return the body by which the process of `identity` takes this child."""
        body = self.proved(Control.ATTACH) | {"identity": asdict(identity), "secret": secret_digest(self.secret)}
        del body["proof"]
        return body


def registration(*, identity: Identity = HERE, secret: str | None = None, **changes: Any) -> dict[str, Any]:
    """Return the body of a registration."""
    number = next(_names)
    secret = secret or f"the secret of worker {number}"
    body = {
        "execution": f"x{number}",
        "session": f"session-{number}",
        "kind": "compute",
        "profile": "default",
        "source": "worker",
        "identity": asdict(identity),
        "secret": secret_digest(secret),
    }
    return body | changes


class Desk:
    """An owner, and letters to it: each goes there and back through kombu's JSON."""

    def __init__(self, ledger: Ledger, *, here: Identity = HERE, owner_pid: int = 0, **options: Any) -> None:
        self.ledger = ledger
        self.owner = Owner(ledger, KEYRING, here, ledger.begin_epoch("desk"), owner_pid=owner_pid, **options)
        self.owner.recover(unknown_grace=None)
        self.letters: list[Any] = []  # every message, in both directions

    def _exchange(self, duty: Callable[[object], Reply | None], message: Any, reader: Principal) -> list[Answer]:
        self.letters.append(message)
        reply = duty(through_kombu(message))
        assert reply is not None, "refused without an answer"
        self.letters.append(reply.message)
        assert reply.reply_to == message["reply_to"]
        return wire.read_reply(through_kombu(reply.message), reader)[1]

    def run(self, message: Any, *, reader: Principal = ALICE) -> list[Answer]:
        return self._exchange(self.owner.apply, message, reader)

    def control(
        self, kind: Control, body: dict[str, Any], *, request: str = "asked", principal: Principal = ALICE
    ) -> Answer:
        message = control_message(kind, body, request, principal=principal, reply_to=REPLY_TO)
        (answer,) = self._exchange(self.owner.control, message, principal)
        return answer

    def register(self, **changes: Any) -> Holder:
        """Register a root, which must succeed."""
        secret = f"the secret of holder {next(_names)}"
        answer = self.control(Control.REGISTER, registration(secret=secret, **changes))
        assert answer.value is not None, answer
        return Holder(hold_from_json(answer.value), secret)

    def adopt(self, holder: Holder) -> Answer:
        """Have the holder adopt under this owner's epoch; where that succeeds it holds under it."""
        answer = self.control(Control.ADOPT, holder.proved(Control.ADOPT, epoch=self.owner.epoch))
        if answer.value is not None:
            holder.hold = hold_from_json(answer.value)
        return answer


def outbox_of(hold: Hold, credential: Credential, folder: Path, **options: Any) -> Outbox:
    return Outbox.open(
        folder,
        Scope(hold.execution_id, hold.session_id, credential.profile),
        secret_digest=credential.secret_digest,
        generation=hold.generation,
        **options,
    )


def stream_of(holder: Holder, folder: Path, *, resend_seconds: float = 2.0) -> Stream:
    outbox = outbox_of(holder.hold, holder.credential, folder)
    return Stream(outbox, holder.hold, holder.credential, resend_seconds=resend_seconds)


@dataclass
class RecordingTransport:
    """A way to nowhere: keeps what it is given, and answers what it is told to."""

    sent: list[Any] = field(default_factory=list)
    answers: list[list[Answer]] = field(default_factory=list)
    away: bool = False
    error: Exception | None = None

    def _carry(self, what: Any) -> list[Answer]:
        self.sent.append(what)
        if self.away:
            raise Unavailable("the broker is away")
        if self.error is not None:
            raise self.error
        return self.answers.pop(0) if self.answers else []

    def control(self, kind: Control, body: dict[str, Any], request: str) -> list[Answer]:
        return self._carry((kind, body, request))

    def run(self, run: Run) -> list[Answer]:
        return self._carry(run)


class HangingTransport:
    """A way on which nothing comes back until it is let go: a broker that accepts and never answers."""

    def __init__(self) -> None:
        self.reached, self.let_go = threading.Event(), threading.Event()

    def _hang(self) -> list[Answer]:
        self.reached.set()
        self.let_go.wait()
        return []

    def control(self, kind: Control, body: dict[str, Any], request: str) -> list[Answer]:
        return self._hang()

    def run(self, run: Run) -> list[Answer]:
        return self._hang()


def names_of(message: dict[str, Any]) -> list[str]:
    """Return the operations of a run's message."""
    return [name for name, _payload in parse(message["run"])]
