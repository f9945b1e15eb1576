"""The form of an outbox' log: records that prove themselves whole, unchanged and in their place.

A record is a header (magic, length of the body, the body's digest, a check of these three) and a body of
canonical JSON. Digest and check are chained over the digest of the record before, so a record that is missing
or moved, or that comes from elsewhere, does not check either. The header's own check is what tells a record cut
short by a crash, which nobody was promised, from a damaged length, which would quietly swallow promised ones.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from ..ledger.errors import InvalidParams, OutboxCorrupt

VERSION = 1
MAGIC = b"TnJ1"
FIRST = bytes(16)  # what the first record is chained over
_FRONT = struct.Struct(">4sI16s")  # magic, length, digest
_CHECK = struct.Struct(">I")
HEADER_BYTES = _FRONT.size + _CHECK.size
_LONGEST = 2**32 - 1


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """One record of a log."""

    def __repr__(self) -> str:
        # Records end up in logs and tracebacks; payloads must not.
        fields = ((name, getattr(self, name)) for name in self.__struct_fields__)
        shown = (f"{name}=<{len(v)} chars>" if name == "payload" else f"{name}={v!r}" for name, v in fields)
        return f"{type(self).__name__}({', '.join(shown)})"


class Meta(_Record, frozen=True, tag="meta"):
    """The first record: whose log it is. `verifier` can be made again only by who holds the secret."""

    version: int
    execution_id: str
    session_id: str
    profile: str
    generation: int
    verifier: str
    next_sequence: int


class Entry(_Record, frozen=True, tag="append"):
    """An operation without a receipt. `payload` is canonical JSON text."""

    sequence: int
    operation: str
    payload: str


class Settle(_Record, frozen=True, tag="settle"):
    """The receipts of these sequences came."""

    sequences: list[int]


class Reject(_Record, frozen=True, tag="reject"):
    """A pending operation is given up; with `renumber`, those behind it move down by one."""

    sequence: int
    reason: str
    detail: str
    renumber: bool


class Advance(_Record, frozen=True, tag="advance"):
    """The generation and the next sequence are these from here on."""

    generation: int
    next_sequence: int


class Rejected(_Record, frozen=True, tag="rejected"):
    """An operation that was given up, under the sequence it had then, and why."""

    sequence: int
    operation: str
    payload: str
    reason: str
    detail: str


Change: TypeAlias = Entry | Settle | Reject | Advance | Rejected
Record: TypeAlias = Meta | Change


class _Versioned(msgspec.Struct):
    version: int


class Block(NamedTuple):
    """A record as it lies in a log: from byte `start` up to `end`."""

    start: int
    end: int
    body: memoryview
    digest: bytes


_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder(Record).decode
_decode_version = msgspec.json.Decoder(_Versioned).decode


def frame(records: Iterable[Record], previous: bytes) -> tuple[list[bytes], bytes]:
    """Return the bytes of each record and the last digest, over which the next record is chained.

    Raises:
        InvalidParams: a text cannot be encoded as UTF-8, or a record is 4 GiB or longer.
    """
    blocks = []
    for record in records:
        body = _encode_text(record)
        digest = _digest(body, previous)
        front = _FRONT.pack(MAGIC, len(body), digest)
        blocks.append(front + _CHECK.pack(_check(front, previous)) + body)
        previous = digest
    return blocks, previous


def framed_size(record: Record) -> int:
    """Return how many bytes the record takes in a log."""
    return HEADER_BYTES + len(_encode_text(record))


def scan(data: bytes, path: Path) -> Iterator[Block]:
    """Yield the whole records of a log in order; one cut short by the end of the data is left out.

    Raises:
        OutboxCorrupt: something else than a whole record, or the beginning of one, lies there.
    """
    view, start, previous = memoryview(data), 0, FIRST
    while (length := _body_length(view[start:], previous, start, path)) is not None:
        digest = _FRONT.unpack_from(view, start)[2]
        body = view[start + HEADER_BYTES : start + HEADER_BYTES + length]
        if _digest(body, previous) != digest:
            raise corrupt(path, start, "the body of a record does not match its digest")
        yield Block(start, start + HEADER_BYTES + length, body, digest)
        start, previous = start + HEADER_BYTES + length, digest


def decode(block: Block, path: Path) -> Record:
    """Return the record a block holds.

    Raises:
        OutboxCorrupt: the block is whole and yet no record of this format.
    """
    try:
        return _decode(block.body)
    except msgspec.MsgspecError as error:
        raise corrupt(path, block.start, f"no record of this format ({error})") from error


def decode_version(block: Block, path: Path) -> int:
    """Return the format's version from a log's first record, which may be newer than this code.

    Raises:
        OutboxCorrupt: the record names no version.
    """
    try:
        return _decode_version(block.body).version
    except msgspec.MsgspecError as error:
        raise corrupt(path, block.start, f"the first record names no version ({error})") from error


def corrupt(path: Path, offset: int, cause: str) -> OutboxCorrupt:
    """Return the error that names file and byte offset."""
    return OutboxCorrupt(f"{path} at byte {offset}: {cause}", {"path": str(path), "offset": offset})


def _body_length(rest: memoryview, previous: bytes, start: int, path: Path) -> int | None:
    """Return the length of the body that begins after a header, None where no whole record is left."""
    if rest[: len(MAGIC)] != MAGIC[: len(rest)]:
        raise corrupt(path, start, "no record begins here")
    if len(rest) < HEADER_BYTES:
        return None
    _, length, _ = _FRONT.unpack_from(rest)
    if _CHECK.unpack_from(rest, _FRONT.size)[0] != _check(rest[: _FRONT.size], previous):
        raise corrupt(path, start, "the header of a record does not check")
    return int(length) if len(rest) >= HEADER_BYTES + length else None


def _encode_text(record: Record) -> bytes:
    try:
        body = _encode(record)
    except UnicodeEncodeError as error:
        raise InvalidParams(f"{type(record).__name__.lower()}: text holds a lone surrogate") from error
    if len(body) > _LONGEST:
        raise InvalidParams(f"{type(record).__name__.lower()}: {len(body)} bytes encoded are too many")
    return body


def _digest(body: bytes | memoryview, previous: bytes) -> bytes:
    digest = blake2b(previous, digest_size=16)
    digest.update(body)
    return digest.digest()


def _check(front: bytes | memoryview, previous: bytes) -> int:
    return zlib.crc32(front, zlib.crc32(previous))
