"""Principals and their keys: signing what registers and adopts, sealing a secret's digest while it travels.

A key file is JSON, readable by its owner only:

    {"principals": {"default": {"key": "<base64 of 32 bytes or more>",
                                "capabilities": ["register", "adopt", "attach", "submit", "probe"]}}}

The owner needs every principal's key, a worker its own only. From one key, three are derived: one that signs,
one that seals, and one that workflows' secrets are made from; none can stand in for another.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ..ledger.errors import ConfigurationError, PermissionDenied

_NONCE = 12


class Capability(StrEnum):
    """What a principal may ask of an owner."""

    REGISTER = "register"
    ADOPT = "adopt"
    ATTACH = "attach"
    SUBMIT = "submit"
    PROBE = "probe"


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody who may send requests, with the key that proves it."""

    name: str
    capabilities: frozenset[Capability]
    signing_key: bytes = field(repr=False)
    sealing_key: bytes = field(repr=False)
    secret_key: bytes = field(repr=False)

    @classmethod
    def of(cls, name: str, key: bytes, capabilities: frozenset[Capability] = frozenset(Capability)) -> Self:
        """Derive a principal's two keys from its one."""
        uses = (b"sign", b"seal", b"secret")
        return cls(name, capabilities, *(hmac.digest(key, b"tenure." + use, hashlib.sha256) for use in uses))

    def sign(self, text: str) -> str:
        """Return the hex HMAC-SHA256 of the text."""
        return keyed_digest(self.signing_key, text)

    def verify(self, text: str, signature: str) -> None:
        """Check a signature in constant time.

        Raises:
            PermissionDenied: it is not of this text and this key.
        """
        if not same(self.sign(text), signature):
            raise PermissionDenied("bad_signature")

    def seal(self, text: str, *, context: str) -> str:
        """Encrypt a text so that only holders of the key can read it, in this context only (AES-256-GCM)."""
        nonce = secrets.token_bytes(_NONCE)
        sealed = AESGCM(self.sealing_key).encrypt(nonce, text.encode(), context.encode())
        return base64.urlsafe_b64encode(nonce + sealed).decode()

    def unseal(self, token: str, *, context: str) -> str:
        """Decrypt what `seal` made.

        Raises:
            PermissionDenied: other key, other context, or not a sealed text.
        """
        try:
            raw = base64.urlsafe_b64decode(token.encode())
            return AESGCM(self.sealing_key).decrypt(raw[:_NONCE], raw[_NONCE:], context.encode()).decode()
        except (ValueError, InvalidTag):
            raise PermissionDenied("bad_seal") from None

    def derive(self, key: str) -> str:
        """Return the secret of a workflow's execution: any worker of this principal can make it, nobody stores it."""
        return keyed_digest(self.secret_key, key)

    def require(self, capability: Capability) -> None:
        """Check that the principal may do this.

        Raises:
            PermissionDenied: it may not.
        """
        if capability not in self.capabilities:
            raise PermissionDenied(f"capability_{capability}")


def keyed_digest(key: bytes, text: str) -> str:
    """Return the hex HMAC-SHA256 of the text."""
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def same(left: str, right: str) -> bool:
    """Compare two texts in constant time."""
    return hmac.compare_digest(left.encode(), right.encode())


class Keyring:
    """The principals that this process knows."""

    def __init__(self, principals: dict[str, Principal]) -> None:
        self._principals = principals

    def get(self, name: str) -> Principal:
        """Return a principal.

        Raises:
            PermissionDenied: it is not known here.
        """
        found = self._principals.get(name)
        if found is None:
            raise PermissionDenied("unknown_principal")
        return found

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a key file.

        Raises:
            ConfigurationError: it is missing, readable by others, or not of the form above.
        """
        try:
            with path.open("rb") as file:
                mode, raw = os.fstat(file.fileno()).st_mode, file.read()
        except OSError as error:
            hint = "; `tenure keys` makes one" if isinstance(error, FileNotFoundError) else ""
            raise ConfigurationError(f"key file {path}: {error.strerror}{hint}") from None
        if os.name == "posix" and mode & 0o077:
            raise ConfigurationError(f"key file {path}: others can read it; `chmod 600` it")
        try:
            entries = json.loads(raw)["principals"].items()
            return cls({name: _principal(name, entry) for name, entry in entries})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"key file {path}: {type(error).__name__}: {error}") from None


def _principal(name: str, entry: dict[str, Any]) -> Principal:
    key = base64.b64decode(entry["key"], validate=True)
    if len(key) < 32:
        raise ValueError(f"the key of {name} has {len(key)} bytes, at least 32 are needed")
    return Principal.of(name, key, frozenset(Capability(c) for c in entry["capabilities"]))


def create(path: Path, name: str) -> bool:
    """Make a key file with one principal that may do everything, unless there is one; returns whether it did.

    Raises:
        ConfigurationError: the folder cannot be written.
    """
    key = base64.b64encode(secrets.token_bytes(32)).decode()
    body = {"principals": {name: {"key": key, "capabilities": [str(c) for c in Capability]}}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Written aside and linked, so that a reader never finds half a file and the first of two makers wins.
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(body, file, indent=2)
        try:
            os.link(aside, path)
        except FileExistsError:
            return False
        finally:
            aside.unlink()
    except OSError as error:
        raise ConfigurationError(f"key file {path}: {error.strerror}") from None
    return True
