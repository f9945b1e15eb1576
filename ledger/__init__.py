"""The ledger: sessions, executions and their operations, in SQL. Knows nothing of Celery.

    ledger = Ledger.open("sqlite:////var/lib/app/ledger.sqlite3", limits=Limits(3, 1))
    epoch = ledger.begin_epoch("owner@host")
    hold = ledger.register(epoch, Registration(...))
    receipt = ledger.apply(epoch, Request(Address(...), 1, "transcript.append", {...}, proof))

An operation is applied once, together with its receipt, its execution's last sequence and its session's
revision, in one transaction that holds the epoch. Sending the same again is always safe: the receipt answers.
A refusal is a receipt; an error consumes nothing and says what to do about it.
"""

from . import hosts, ownership, reads, submissions
from .claims import Claim, Identity, Proof, claim_digest, secret_digest
from .engine import Receipt, Request
from .executions import Address, Hold, Registration
from .ledger import Ledger
from .limits import Limits
from .operations import BUILTIN, Operation, Refusal, Registry, Work, operation
from .recovery import Death
from .states import Kind, Outcome, Status

__all__ = [
    "BUILTIN",
    "Address",
    "Claim",
    "Death",
    "Hold",
    "Identity",
    "Kind",
    "Ledger",
    "Limits",
    "Operation",
    "Outcome",
    "Proof",
    "Receipt",
    "Refusal",
    "Registration",
    "Registry",
    "Request",
    "Status",
    "Work",
    "claim_digest",
    "hosts",
    "operation",
    "ownership",
    "reads",
    "secret_digest",
    "submissions",
]
