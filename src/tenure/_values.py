"""How the text of a variable becomes a value, and how a value is shown without its password.

A `Kind` is what is allowed, in words, and a reader that raises `NotAllowedError` for everything else.
Numbers are plain digits: no sign, blank, exponent, underscore, leading zero, `nan` or `0x10`.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_SOCKET_PATH_BYTES = 103  # the shortest limit of the systems supported: 104 on macOS with the final NUL


class NotAllowedError(Exception):
    """A text is refused. The message is a hint or empty, never a part of the text."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What is allowed, in words, and what reads it."""

    allowed: str
    read: Callable[[str], Any]


def mask_url(text: str) -> str:
    """Return the text with a URL's password hidden, also where the password made the URL malformed."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "", text
    user_info, at, place = rest.rpartition("@")
    if at:
        named = bool(separator) and ":" in user_info
        user_info = user_info.partition(":")[0] + ":***" if named else "***"
    # What stands where the port should and is not a number may be a password whose host is missing.
    place = re.sub(r"^(\[[^]]*]|[^][:/?#]*):(?![0-9]*([/?#]|$))[^/?#]*", r"\1:***", place)
    place = re.sub(r"(?i)([?&][^=&]*(?:pass|pwd|secret|token)[^=&]*=)[^&#]*", r"\1***", place)
    return f"{scheme}{separator}{user_info}{at}{place}"


def whole(low: int, high: int) -> Kind:
    """Return the kind of whole numbers between two bounds."""

    def read(text: str) -> int:
        if not re.fullmatch(r"0|[1-9][0-9]{0,17}", text) or not low <= int(text) <= high:
            raise NotAllowedError
        return int(text)

    return Kind(f"a whole number from {low} to {high}", read)


def seconds(low: float, high: float) -> Kind:
    """Return the kind of durations between two bounds, with a fraction if need be."""

    def read(text: str) -> float:
        if not re.fullmatch(r"(0|[1-9][0-9]{0,11})(\.[0-9]{1,9})?", text) or not low <= float(text) <= high:
            raise NotAllowedError
        return float(text)

    return Kind(f"seconds from {low:.15g} to {high:.15g}", read)


def token(letters: str) -> Kind:
    """Return the kind of short names made of some letters, the underscore, the dot and the dash."""

    def read(text: str) -> str:
        if not re.fullmatch(f"[{letters}_.-]{{1,64}}", text):
            raise NotAllowedError
        return text

    return Kind(f"1 to 64 characters of {letters}_.-", read)


def _read_queue(text: str) -> str:
    if text.startswith("amq."):
        raise NotAllowedError("RabbitMQ keeps amq. for itself")
    return str(token("A-Za-z0-9").read(text))


def _read_path(text: str) -> Path:
    if not text.startswith("/") or text.startswith("//"):
        raise NotAllowedError
    return Path(text)


def _read_level(text: str) -> str:
    if text.upper() not in _LEVELS:
        raise NotAllowedError
    return text.upper()


def _read_modules(text: str) -> tuple[str, ...]:
    names = tuple(name.strip(" ") for name in text.split(",")) if text else ()
    for part in (part for name in names for part in name.split(".")):
        if not part.isidentifier() or keyword.iskeyword(part):
            raise NotAllowedError
    return names


def _split(text: str) -> SplitResult:
    # urlsplit drops line breaks and tabs silently; here they are refused.
    if re.search(r"[\x00-\x20\x7f]", text):
        raise NotAllowedError("a URL has no blanks")
    malformed = NotAllowedError("one URL; special characters in its user and password are percent-encoded")
    if "#" in text or text.count("://") != 1:
        raise malformed
    try:
        parts = urlsplit(text)
        _ = parts.port  # read for its check
    except ValueError:  # not chained: its message can hold the password
        raise malformed from None
    return parts


def _read_ledger(text: str) -> str:
    parts = _split(text)
    scheme, _, rest = text.partition("://")
    match scheme:
        case "sqlite":
            allowed = not parts.netloc and not parts.query and bool(re.fullmatch(r"//[^/].*(?<!/)", parts.path))
        case "postgresql" | "postgresql+psycopg":
            allowed = len(parts.path) > 1  # a database that is named, not the driver's guess
        case _:
            allowed = False
    if not allowed:
        raise NotAllowedError
    return text if scheme == "sqlite" else f"postgresql+psycopg://{rest}"


def _read_broker(text: str) -> str:
    scheme = text.partition("://")[0]
    if scheme == "valkey":
        raise NotAllowedError("kombu has no such transport: address a Valkey server as redis://")
    if scheme == "memory":
        raise NotAllowedError("no other process would see its messages")
    parts = _split(text)
    match scheme:
        case "redis" | "rediss":
            allowed = bool(parts.hostname and re.fullmatch(r"(/[0-9]{0,5})?", parts.path))
        case "redis+socket":
            allowed = not parts.hostname and 1 < len(parts.path.encode()) <= _SOCKET_PATH_BYTES
        case _:
            allowed = scheme in {"amqp", "amqps"} and bool(parts.hostname)
    if not allowed:
        raise NotAllowedError
    return text


PATH = Kind("an absolute path", _read_path)
QUEUE = Kind("1 to 64 characters of A-Za-z0-9_.-", _read_queue)
LEVEL = Kind(", ".join(_LEVELS), _read_level)
MODULES = Kind("module names with commas between them", _read_modules)
LEDGER = Kind(
    "sqlite:///ABSOLUTE-PATH or postgresql://[USER[:PASSWORD]@]HOST[:PORT]/DATABASE",
    _read_ledger,
)
BROKER = Kind(
    "redis://, rediss://, amqp:// or amqps:// with a host, or redis+socket:///ABSOLUTE-PATH",
    _read_broker,
)
