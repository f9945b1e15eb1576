"""The states of an execution and the moves between them.

    (none) --register--> registered --first receipt or adopt--> running --finish--> terminal
    (none) --reserve---> running                                 (a child)
    registered | running --recover--> unknown                    (a root; a child goes to terminal)
    unknown --adopt, or takeover by another process--> running
    unknown --discard--> terminal

`terminal` is absorbing. An outcome is not a status: it says how a terminal execution ended.
"""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """Where an execution stands."""

    REGISTERED = "registered"  # its process is known, nothing has been applied yet
    RUNNING = "running"  # it has a receipt, or is a child
    UNKNOWN = "unknown"  # its owner or its process is gone; nobody may write until it is adopted
    TERMINAL = "terminal"  # it has ended and stays so

    @property
    def writable(self) -> bool:
        """Whether the execution may add receipts."""
        return self in {Status.REGISTERED, Status.RUNNING}


class Kind(StrEnum):
    """What an execution is for. Only an owner makes a child."""

    COMPUTE = "compute"
    CRON = "cron"
    KANBAN = "kanban"
    CHILD = "child"


class Outcome(StrEnum):
    """How a terminal execution ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"  # also when somebody else ended it


class Reason(StrEnum):
    """Why an execution changed its status, where tenure itself changed it."""

    REGISTERED = "registered"
    RESERVED = "reserved"
    FIRST_RECEIPT = "first_receipt"
    ADOPTED = "adopted"
    FINISHED = "finished"
    PARENT_FINISHED = "parent_finished"
    OWNER_RESTARTED = "owner_restarted"
    PROCESS_DEAD = "process_dead"
    PROCESS_STOPPED = "process_stopped"  # it stood still for a whole lease
    TAKEN_OVER = "taken_over"
    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    DISCARDED = "discarded"
    GRACE_EXPIRED = "grace_expired"


CHILD_SESSION_END = "agent_close"  # the end_reason of a child's session that its child did not end itself

TRANSITIONS: frozenset[tuple[Status | None, Status]] = frozenset(
    {
        (None, Status.REGISTERED),
        (None, Status.RUNNING),
        (Status.REGISTERED, Status.RUNNING),
        (Status.REGISTERED, Status.UNKNOWN),
        (Status.REGISTERED, Status.TERMINAL),
        (Status.RUNNING, Status.UNKNOWN),
        (Status.RUNNING, Status.TERMINAL),
        (Status.UNKNOWN, Status.RUNNING),
        (Status.UNKNOWN, Status.TERMINAL),
    }
)
