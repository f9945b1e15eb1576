"""The handle by which a worker writes: one execution's hold on one session.

    with Execution.start(client, "invoice-17") as run:
        run.append([{"role": "user", "content": "..."}])
        run.finish()

Every method that writes journals first, then waits for the receipt. A `TimeoutError` means "not yet": the
operation stays journalled and is sent until the ledger has answered.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from ..ledger import Hold, Kind, Outcome, Receipt, Refusal, Status, secret_digest
from ..ledger.canonical import canonical, parse
from ..ledger.claims import SECRET_CHARS
from ..ledger.errors import ConfigurationError, InvalidParams, Refused, StaleGeneration
from ..tasks.client import ANSWER_SECONDS, Client, hold_from_json
from ..tasks.stream import Credential
from ..tasks.wire import Control

_TICKET = "tenure.ticket"


@dataclass(frozen=True, slots=True)
class Child:
    """A child as the ledger has it, whatever became of it."""

    execution_id: str
    session_id: str
    status: Status
    outcome: Outcome | None
    reason: str  # why it is in this status, such as `finished` or `owner_restarted`
    result: Any
    sequence: int  # the parent's sequence that reserved it
    last_sequence: int


class Execution:
    """One execution, held by this process."""

    def __init__(
        self, client: Client, hold: Hold, credential: Credential, secret: str, *, within: float = ANSWER_SECONDS
    ) -> None:
        """Use `start`, `reserve_child` or `attach`. `within` is how many seconds a call waits for its receipt."""
        client.check_process()
        self.client, self.within = client, within
        self._secret, self._credential = secret, credential
        self._stream = client.open_stream(hold, credential)
        self._reserved = 0
        self._limits: dict[str, dict[str, int]] = {}
        self._used = self._given_away = self._finished = self._closed = False

    @classmethod
    def start(
        cls,
        client: Client,
        session_id: str,
        *,
        kind: Kind = Kind.COMPUTE,
        profile: str = "default",
        source: str = "worker",
        secret: str | None = None,
        within: float = ANSWER_SECONDS,
    ) -> Self:
        """Register a new execution that holds the session.

        Raises:
            TimeoutError: no owner answered in time; nothing is held.
            AdmissionConflict: another execution holds the session.
            RuntimeDraining, PermissionDenied, StaleGeneration, InvalidParams: as the owner answered.
        """
        secret = _checked(secret or secrets.token_urlsafe(32))
        credential = Credential(profile, client.principal.name, client.identity, secret_digest(secret))
        body = {
            "execution": uuid4().hex,
            "session": session_id,
            "kind": kind.value,
            "profile": profile,
            "source": source,
            "identity": asdict(client.identity),
            "secret": credential.secret_digest,
        }
        hold = hold_from_json(client.ask(Control.REGISTER, body, within=within))
        return cls(client, hold, credential, secret, within=within)

    @classmethod
    def attach(cls, client: Client, ticket: str, *, within: float = ANSWER_SECONDS) -> Self:
        """Take over a reserved child in this process, by the ticket that its parent's process made.

        Raises:
            PermissionDenied: the ticket is not of this principal, or another process has attached.
            StaleEpoch, StaleGeneration: the child has been retired meanwhile.
        """
        facts = parse(client.principal.unseal(ticket, context=_TICKET), name="ticket")
        secret = facts["secret"]
        credential = Credential(facts["profile"], client.principal.name, client.identity, secret_digest(secret))
        body = {
            "epoch": facts["epoch"],
            "execution": facts["execution"],
            "session": facts["session"],
            "generation": facts["generation"],
            "identity": asdict(client.identity),
            "secret": credential.secret_digest,
        }
        hold = hold_from_json(client.ask(Control.ATTACH, body, within=within))
        return cls(client, hold, credential, secret, within=within)

    @property
    def execution_id(self) -> str:
        """The execution's id."""
        return self._stream.hold.execution_id

    @property
    def session_id(self) -> str:
        """The session that it holds."""
        return self._stream.hold.session_id

    @property
    def epoch(self) -> int:
        """The epoch it writes under, as far as this process knows."""
        return self._stream.hold.epoch

    def submit(self, operation: str, payload: dict[str, Any]) -> Future[Receipt]:
        """Journal an operation and return its receipt's future. It is durable here when this returns.

        "Journalled" is not "committed": only the receipt says that.

        Raises:
            InvalidParams: the payload is malformed; `detail` names the field.
            OutboxFull, Unavailable: nothing was journalled.
            StaleGeneration, PermissionDenied: this execution can write no more.
            ConfigurationError: the handle was closed, or comes from before a fork.
        """
        self.client.check_process()
        if self._closed:
            raise ConfigurationError(f"the handle of execution {self.execution_id} is closed")
        text = self.client.encode(operation, payload)
        self._used = True
        return self.client.sender.append(self._stream, operation, text)

    def apply(self, operation: str, payload: dict[str, Any]) -> Receipt:
        """Journal an operation and wait for its receipt, which may be a refusal.

        Raises:
            TimeoutError: not yet answered; the operation stays journalled.
            TenureError: as `submit`, or why it can never be applied.
        """
        return self._wait(self.submit(operation, payload))

    def _wait(self, promise: Future[Receipt]) -> Receipt:
        try:
            return self.client.sender.wait(promise, self.within)
        except TimeoutError:
            text = f"no receipt within {self.within} s; execution {self.execution_id} keeps it journalled"
            raise TimeoutError(text) from None

    def _taken(self, operation: str, payload: dict[str, Any]) -> dict[str, Any]:
        receipt = self.apply(operation, payload)
        if receipt.refused:
            facts = {key: value for key, value in receipt.result.items() if key != "refused"}
            raise Refused(receipt.refused, facts)
        return receipt.result

    def create_session(
        self,
        *,
        source: str = "worker",
        model: str | None = None,
        model_config: dict[str, Any] | None = None,
        system_prompt: str | None = None,
    ) -> None:
        """Set the session's constructor facts."""
        facts = {"model": model, "model_config": model_config, "system_prompt": system_prompt}
        self._taken("session.create", {"source": source} | {k: v for k, v in facts.items() if v is not None})

    def append(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Append messages to the transcript; returns their positions, counted from 1.

        Raises:
            Refused: the session has ended.
            TimeoutError, TenureError: as `apply`.
        """
        positions: list[int] = self._taken("transcript.append", {"messages": list(messages)})["positions"]
        return positions

    def record_usage(self, model: str, **counters: Any) -> None:
        """Add token counts, and `cost` in US dollars, to the session's and the model's counters."""
        self._taken("usage.record", {"model": model} | counters)

    def record_step(self, name: str, input_digest: str, result: Any) -> None:
        """Keep a step's result."""
        self._taken("step.record", {"name": name, "input_digest": input_digest, "result": result})

    def end_session(self, end_reason: str) -> bool:
        """End the session; returns whether it was this that ended it."""
        return bool(self._taken("session.end", {"end_reason": end_reason})["ended"])

    def narrow(self, **limits: int) -> None:
        """Lower `max_concurrent_children` or `max_spawn_depth` for the reservations from here on, and all below them.

        Nothing given here can widen what is configured, or what an ancestor has narrowed.

        Raises:
            InvalidParams: another name, or not a whole number in range.
        """
        self.client.encode("child.reserve", {"secret_digest": "0" * 64, "limits": limits})  # it checks them
        known = self._limits.get("limits", {})
        lower = {name: min(value, known.get(name, value)) for name, value in limits.items()}
        self._limits = {"limits": known | lower}

    def reserve_child(self, *, secret: str | None = None) -> Execution | Refusal:
        """Have the owner mint a child, with its own session, stream and outbox; or be told why not.

        Without a secret the child's is derived from this one's, so that a successor can derive it again.
        """
        self._reserved += 1
        secret = _checked(secret or self._derived(self._reserved))
        receipt = self.apply("child.reserve", {"secret_digest": secret_digest(secret)} | self._limits)
        if receipt.refused:
            facts = {key: value for key, value in receipt.result.items() if key != "refused"}
            return Refusal(receipt.refused, facts)
        told = receipt.result
        hold = Hold(
            told["execution_id"],
            told["session_id"],
            Kind.CHILD,
            Status.RUNNING,
            self.epoch,
            told["generation"],
            0,
        )
        mine = self._credential
        credential = Credential(mine.profile, mine.principal, mine.identity, secret_digest(secret))
        return Execution(self.client, hold, credential, secret, within=self.within)

    def _derived(self, ordinal: int) -> str:
        text = f"tenure.child\0{self.execution_id}\0{ordinal}"
        return hmac.new(self._secret.encode(), text.encode(), hashlib.sha256).hexdigest()

    def ticket(self) -> str:
        """Return the sealed ticket by which another process takes this child over; this one lets go of it.

        Raises:
            ConfigurationError: it is not a child, has been written to from here, or this is a fork.
        """
        self.client.check_process()
        hold = self._stream.hold
        if hold.kind is not Kind.CHILD or self._used:
            raise ConfigurationError("a ticket is for a child that was not written to from here")
        self._given_away = True
        facts = {
            "epoch": hold.epoch,
            "execution": hold.execution_id,
            "session": hold.session_id,
            "generation": hold.generation,
            "profile": self._credential.profile,
            "secret": self._secret,
        }
        self.close()
        return self.client.principal.seal(canonical(facts), context=_TICKET)

    def children(self) -> list[Child]:
        """Return every child this execution ever had, and what became of it. It takes no sequence.

        Raises:
            TimeoutError: no owner answered in time.
        """
        body = self.client.prove(Control.INSPECT, self._stream.hold, self._stream.claim)
        found = self.client.ask(Control.INSPECT, body, within=self.within)["children"]
        return [_child(child) for child in found]

    def finish(self, *, outcome: Outcome = Outcome.COMPLETED, result: Any = None) -> list[str]:
        """End this execution and every live descendant; returns the ids of those."""
        retired: list[str] = self._taken("execution.finish", {"outcome": Outcome(outcome).value, "result": result})[
            "retired"
        ]
        self._finished = True
        return retired

    def flush(self) -> None:
        """Wait until everything journalled has its receipt.

        Raises:
            TimeoutError: not yet; it stays journalled.
        """
        for promise in list(self._stream.promises.values()):
            self._wait(promise)

    def close(self) -> None:
        """Let go of the handle. What is journalled stays journalled.

        A child that was never used is finished, which frees its slot. A parent is not: it may go on elsewhere.
        In a forked child this lets go of copies only.
        """
        if self._closed:
            return
        if self.client.forked:
            # Neither the sender's lock nor the outbox is this process' own.
            self._closed = True
            self._stream.outbox.close()
            return
        unused_child = self._stream.hold.kind is Kind.CHILD and not (self._used or self._given_away)
        try:
            if unused_child and self._stream.broken is None:
                with suppress(StaleGeneration):  # it has ended already, with its parent or with its owner
                    self.finish(outcome=Outcome.INTERRUPTED)
        finally:
            self._closed = True
            self.client.sender.remove(self._stream)
            if (self._finished or self._given_away) and self._stream.idle:
                self._stream.outbox.unlink()
            else:
                self._stream.outbox.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What ends the process, and not the work, settles nothing: the work may go on elsewhere.
        if kind is None or issubclass(kind, Exception):
            self.close()


def _checked(secret: str) -> str:
    if len(secret) not in SECRET_CHARS:
        raise InvalidParams(f"secret: {SECRET_CHARS.start} to {SECRET_CHARS.stop - 1} characters are allowed")
    return secret


def _child(value: dict[str, Any]) -> Child:
    return Child(
        execution_id=value["execution_id"],
        session_id=value["session_id"],
        status=Status(value["status"]),
        outcome=Outcome(value["outcome"]) if value["outcome"] else None,
        reason=value["reason"],
        result=value["result"],
        sequence=value["sequence"],
        last_sequence=value["last_sequence"],
    )
