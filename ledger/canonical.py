"""One encoding of JSON values, so that equal values have equal digests.

Sorted keys, no white space, UTF-8 text. What JSON cannot carry faithfully from any sender to any reader is refused with
the path of the field: NaN and infinities, NUL, lone surrogates, keys that are not text, integers beyond
64 bits, nesting beyond 100 levels, and Python types that JSON would quietly turn into others.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any, NoReturn

import msgspec

from .errors import InvalidParams

MAX_BYTES = 4 * 2**20  # of one payload, encoded
MAX_DEPTH = 100
_INT64 = range(-(2**63), 2**63)
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")).encode
_encode_simple = msgspec.json.Encoder(order="sorted").encode  # the same text, sooner; but floats differ


def canonical(value: Any, *, name: str = "payload", max_bytes: int = MAX_BYTES) -> str:
    """Return the canonical JSON text of `value`.

    Raises:
        InvalidParams: the value is not faithful JSON, or its UTF-8 form exceeds `max_bytes`.
    """
    encoded = _simply(value)
    if encoded is None:
        _check(value, name, 0)
        encoded = _encode(value).encode()
    if len(encoded) > max_bytes:
        raise InvalidParams(f"{name}: {len(encoded)} bytes encoded, at most {max_bytes} are allowed")
    return encoded.decode()


def parse(text: str, *, name: str = "payload") -> Any:
    """Read JSON text strictly; `canonical` still has to judge the value.

    Raises:
        InvalidParams: the text is not JSON, or uses NaN or Infinity.
    """

    def refuse(constant: str) -> NoReturn:
        raise InvalidParams(f"{name}: {constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidParams(f"{name}: not JSON ({type(error).__name__})") from error


def digest(*parts: str) -> str:
    """Return the hex SHA-256 over the parts, unambiguously joined."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def shown(value: object) -> str:
    """Return a value as an error may show it: short, and even where Python will not print it."""
    if isinstance(value, int) and value.bit_length() > 64:
        return "an integer beyond 64 bits"
    return f"{value!r:.40}"


def _simply(value: Any) -> bytes | None:
    """Return the encoding of a value that holds nothing to look at twice, else None."""
    if not _simple(value, 0):
        return None
    try:
        return _encode_simple(value)
    except UnicodeEncodeError:
        return None  # a lone surrogate; `_check` finds where


def _simple(value: Any, depth: int) -> bool:
    kind = type(value)
    if kind is str:
        return "\0" not in value
    if depth > MAX_DEPTH:
        return False
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str or "\0" in key or not _simple(item, depth + 1):
                return False
        return True
    if kind is list:
        return all([_simple(item, depth + 1) for item in value])  # noqa: C419 (a generator costs more than it saves)
    return value is None or kind is bool or (kind is int and value in _INT64)


def _check(value: Any, path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise InvalidParams(f"{path}: nested more than {MAX_DEPTH} levels deep")
    kind = type(value)  # exactly: a subclass may encode as something else
    if kind is str:
        _check_text(value, path)
    elif kind is dict:
        for key, item in value.items():
            _check_key(key, path)
            _check(item, f"{path}.{key:.40}", depth + 1)
    elif kind is list:
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]", depth + 1)
    else:
        _check_scalar(value, path)


def _check_key(key: object, path: str) -> None:
    if type(key) is not str:
        raise InvalidParams(f"{path}: key {shown(key)} is {type(key).__name__}, keys are text")
    _check_text(key, f"{path} key")


def _check_scalar(value: Any, path: str) -> None:
    kind = type(value)
    if kind is int:
        if value not in _INT64:
            raise InvalidParams(f"{path}: integer beyond 64 bits")
    elif kind is float:
        if not math.isfinite(value):
            raise InvalidParams(f"{path}: {value} is not JSON")
    elif value is not None and kind is not bool:
        raise InvalidParams(f"{path}: {kind.__name__} is not a JSON type")


def _check_text(value: str, path: str) -> None:
    if "\0" in value:
        raise InvalidParams(f"{path}: text holds a NUL character")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidParams(f"{path}: text holds a lone surrogate") from None
