"""Who holds an execution: identity facts, the claim made from them, and proofs that it is held.

The secret never leaves its holder. The ledger keeps one digest, the claim, which binds the secret to
everything it may be used for; a proof is anything that can say whether it matches that digest.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import dataclass
from typing import Protocol

SECRET_CHARS = range(16, 257)  # allowed length of a secret, in characters


@dataclass(frozen=True, slots=True)
class Identity:
    """Facts by which a process may be declared dead. They never decide who may write.

    `birth` is `ticks:N` (the kernel's start ticks, compared exactly) or `time:S` (seconds since 1970,
    compared within two seconds).
    """

    host: str  # digest of the machine id and the pid namespace
    boot: str  # the kernel's boot id, or "" where there is none
    pid: int
    birth: str
    user: str


def secret_digest(secret: str) -> str:
    """Return the hex SHA-256 by which a secret is known outside its holder's process."""
    return hashlib.sha256(b"tenure.secret\0" + secret.encode()).hexdigest()


def claim_digest(
    *,
    profile: str,
    session_id: str,
    execution_id: str,
    generation: int,
    identity: Identity,
    secret_digest: str,
    principal: str,
) -> str:
    """Return the hex SHA-256 of a claim: one holder's hold on one execution at one generation."""
    facts = [
        profile,
        session_id,
        execution_id,
        generation,
        identity.host,
        identity.pid,
        identity.birth,
        secret_digest,
        principal,
    ]
    text = json.dumps(facts, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(b"tenure.claim\0" + text.encode()).hexdigest()


class Proof(Protocol):
    """Evidence that the sender holds a claim, judged against the stored digest in constant time."""

    def matches(self, claim: str) -> bool:
        """Return whether this was made by the holder of `claim`."""


@dataclass(frozen=True, slots=True, repr=False)
class Claim:
    """The claim itself as proof: for a caller in the ledger's own process."""

    digest: str

    def matches(self, claim: str) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(self.digest, claim)
