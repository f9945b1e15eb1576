"""One small tree of errors: a stable reason, a detail, and what the sender should do.

`str(error)` is the reason token. Every error survives pickle and Celery's JSON round trip, because
`args` is all it is made of: `(detail, data)`, a string and a JSON object.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar


class Action(StrEnum):
    """What a sender should do about an error."""

    NEVER = "never"  # permanent: sending it again cannot help
    ADOPT = "adopt"  # adopt under the current epoch, then send again
    RESEND = "resend"  # send again from the sequence named in the error
    LATER = "later"  # send the same again after a pause


class TenureError(Exception):
    """Something tenure cannot do. `reason` is stable, `detail` says which of several causes it was."""

    reason: ClassVar[str] = "error"
    action: ClassVar[Action] = Action.NEVER

    def __init__(self, detail: str = "", data: dict[str, Any] | None = None) -> None:
        self.detail = detail
        self.data = data or {}
        super().__init__(self.detail, self.data)

    def __str__(self) -> str:
        return self.reason

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.detail!r}, {self.data!r})"

    def explain(self) -> str:
        """One line for a person: the reason and, where there is one, the detail."""
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class InvalidParams(TenureError):
    """A request is malformed; `detail` names the field."""

    reason = "invalid_params"


class NotFound(TenureError):
    """No such execution or session."""

    reason = "not_found"


class PermissionDenied(TenureError):
    """The claim, the session or the principal is not the one that may do this."""

    reason = "permission_denied"


class StaleEpoch(TenureError):
    """The epoch presented is not the current one; `data["epoch"]` is."""

    reason = "stale_epoch"
    action = Action.ADOPT


class StaleGeneration(TenureError):
    """The execution no longer holds its session: taken over, unknown or terminal."""

    reason = "stale_generation"


class AdmissionConflict(TenureError):
    """The key is taken: another payload has this sequence, or another execution this session."""

    reason = "admission_conflict"


class SequenceGap(TenureError):
    """An earlier sequence is missing; `data["expected"]` is the one to send from."""

    reason = "sequence_gap"
    action = Action.RESEND


class RuntimeDraining(TenureError):
    """The runtime takes no new executions; `detail` is the operator's reason."""

    reason = "runtime_draining"
    action = Action.LATER


class Unavailable(TenureError):
    """The database, the broker or the disk cannot serve this now; nothing was written."""

    reason = "unavailable"
    action = Action.LATER


class OutboxFull(TenureError):
    """The outbox' byte cap is reached, nothing was written; `data` has `cap`, `pending` and `needed` bytes."""

    reason = "outbox_full"
    action = Action.LATER


class OutboxCorrupt(TenureError):
    """The outbox' log does not check, nothing was changed; `data` has its `path` and the byte `offset`."""

    reason = "outbox_corrupt"


class OwnerSuperseded(StaleEpoch):
    """This owner's epoch is no longer the current one: it must stop applying and leave."""


class Refused(TenureError):
    """A receipt says no; `detail` is its reason and `data` its facts. The sequence is consumed."""

    reason = "refused"


class SchemaMismatch(TenureError):
    """The ledger's schema is not the one this version reads; `detail` says how to bring it there."""

    reason = "schema_mismatch"


class ConfigurationError(TenureError):
    """A setting is out of range; `detail` says what was given and what is allowed."""

    reason = "configuration"


def _tree(base: type[TenureError]) -> dict[str, type[TenureError]]:
    found = {base.reason: base}
    for sub in base.__subclasses__():
        found = _tree(sub) | found  # where a subclass shares the reason, the parent is meant
    return found


def to_wire(error: TenureError) -> dict[str, Any]:
    """Return the error as a JSON object; `from_wire` is its inverse."""
    return {"reason": error.reason, "detail": error.detail, "data": error.data}


def from_wire(value: dict[str, Any]) -> TenureError:
    """Rebuild an error; an unknown reason (a newer owner) becomes a plain `TenureError`."""
    cls = _tree(TenureError).get(value["reason"], TenureError)
    return cls(value.get("detail", ""), value.get("data"))
