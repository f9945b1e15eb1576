"""Whose an outbox is: its scope, and the first record by which a successor proves to be the same holder."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from dataclasses import dataclass

from ..ledger.errors import InvalidParams, PermissionDenied
from .journal import VERSION, Meta

_EXECUTION_ID = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,128}")  # it becomes the name of a file
_DIGEST = re.compile(r"[0-9a-f]{64}")
_INT64 = 2**63


@dataclass(frozen=True, slots=True)
class Scope:
    """What an outbox is for; no outbox of another scope is ever opened in its place."""

    execution_id: str
    session_id: str
    profile: str


def first_record(scope: Scope, secret_digest: str, generation: int, first_sequence: int) -> Meta:
    """Return what the log of this scope begins with. Neither the secret nor its digest can be read from it.

    Raises:
        InvalidParams: a value is malformed.
    """
    facts = (scope.execution_id, scope.session_id, scope.profile)
    if not all_text(*facts) or not _EXECUTION_ID.fullmatch(scope.execution_id):
        raise InvalidParams("execution_id: 1 to 128 letters, digits, '_', '.' or '-', not beginning with '.'")
    if not _DIGEST.fullmatch(secret_digest):
        raise InvalidParams("secret_digest: not the digest of a secret")
    check_minima(generation, first_sequence)
    text = "tenure.outbox\0" + json.dumps(facts, ensure_ascii=True, separators=(",", ":"))
    return Meta(
        version=VERSION,
        execution_id=scope.execution_id,
        session_id=scope.session_id,
        profile=scope.profile,
        generation=generation,
        verifier=hmac.new(secret_digest.encode(), text.encode(), hashlib.sha256).hexdigest(),
        next_sequence=first_sequence,
    )


def refuse_other(expected: Meta, found: Meta) -> None:
    """Compare, in constant time where it touches the secret, whose a log is with whose it must be.

    Raises:
        PermissionDenied: it was made with another scope or secret.
    """
    same_secret = hmac.compare_digest(found.verifier.encode(), expected.verifier.encode())
    if not same_secret or _scope_of(found) != _scope_of(expected):
        raise PermissionDenied(f"the outbox of {expected.execution_id} was made with another scope or secret")


def _scope_of(meta: Meta) -> Scope:
    return Scope(meta.execution_id, meta.session_id, meta.profile)


def check_minima(*numbers: object) -> None:
    """Judge a generation and a sequence.

    Raises:
        InvalidParams: they are not whole numbers of at least 0 and 1.
    """
    for number, lowest in zip(numbers, (0, 1), strict=True):
        if type(number) is not int or not lowest <= number < _INT64:
            raise InvalidParams("generation, next_sequence: whole numbers of at least 0 and 1")


def all_text(*values: object) -> bool:
    """Return whether each value is text, which callers without a type checker may get wrong."""
    return all(isinstance(value, str) for value in values)
