"""The log's format: what a crash may leave is dropped, anything else is refused, and nothing is ever invented."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest

from tenure.ledger.errors import ConfigurationError, InvalidParams, OutboxCorrupt, PermissionDenied
from tenure.tasks import journal
from tenure.tasks.backlog import REJECTED_BYTES, REJECTED_KEPT, Backlog, read_log
from tenure.tasks.journal import (
    FIRST,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Advance,
    Entry,
    Meta,
    Reject,
    Rejected,
    Settle,
    _check,
    _digest,
    decode,
    frame,
    framed_size,
    scan,
)

PATH = Path("x.log")
META = Meta(VERSION, "e", "s", "p", 3, "00", 1)
RECORDS = [
    META,
    Entry(1, "transcript.append", '{"a":"é\\n"}'),
    Entry(2, "usage.record", "{}"),
    Settle([1]),
    Entry(3, "op", '{"quoted":"\\""}'),
    Entry(4, "op", "[]"),
    Reject(2, "invalid_params", "model: unknown", renumber=True),
    Advance(4, 9),
    Entry(9, "op", "9"),
    Reject(2, "admission_conflict", "", renumber=False),
]


def log_of(*records):
    return b"".join(frame(records, FIRST)[0])


def read(data):
    return read_log(data, PATH, lambda meta: None)


def told(backlog):
    held = (list(backlog.entries.values()), list(backlog.rejected))
    return (*held, backlog.next_sequence, backlog.generation, backlog.pending_bytes)


def states():
    """What the log says after each of its records, told without any log."""
    backlog = Backlog(META)
    said = [told(backlog)]
    for record in RECORDS[1:]:
        backlog.apply(record, framed_size(record))
        said.append(told(backlog))
    return said


def test_records_come_back_as_they_were():
    assert [decode(block, PATH) for block in scan(log_of(*RECORDS), PATH)] == RECORDS


def test_a_body_is_canonical_json_and_embeds_the_payload_verbatim():
    (block,) = frame([Entry(7, "op", '{"é":1.0}')], FIRST)[0]
    body = block[HEADER_BYTES:].decode()
    assert body == '{"kind":"append","operation":"op","payload":"{\\"é\\":1.0}","sequence":7}'


def test_reading_replays_what_was_recorded():
    backlog, length, _ = read(log_of(*RECORDS))
    assert told(backlog) == states()[-1]
    assert list(backlog.entries) == [3, 9]
    assert backlog.entries[3] == Entry(3, "op", "[]")
    assert length == len(log_of(*RECORDS))


def test_a_log_cut_at_any_byte_is_an_exact_prefix_or_refused():
    data, said = log_of(*RECORDS), states()
    ends = list(accumulate(map(framed_size, RECORDS)))
    for cut in range(len(data)):
        if cut < ends[0]:
            with pytest.raises(OutboxCorrupt):
                read(data[:cut])
            continue
        backlog, length, _ = read(data[:cut])
        whole = sum(end <= cut for end in ends)
        assert told(backlog) == said[whole - 1]
        assert length == ends[whole - 1]


def test_no_flipped_bit_goes_unnoticed_even_in_the_last_record():
    data = log_of(*RECORDS)
    starts = [0, *accumulate(map(framed_size, RECORDS))]
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(OutboxCorrupt) as caught:
            read(bytes(damaged))
        assert caught.value.data["offset"] == max(start for start in starts if start <= bit // 8)


def test_a_flipped_length_is_corruption_and_not_a_record_cut_short():
    data = bytearray(log_of(*RECORDS))
    data[len(log_of(*RECORDS[:-1])) + len(MAGIC)] ^= 0x80  # the last record now claims two gigabytes more
    with pytest.raises(OutboxCorrupt):
        read(bytes(data))


@pytest.mark.parametrize("gone", range(1, len(RECORDS) - 1))
def test_a_missing_record_is_noticed(gone):
    blocks = frame(RECORDS, FIRST)[0]
    with pytest.raises(OutboxCorrupt):
        read(b"".join(blocks[:gone] + blocks[gone + 1 :]))


@pytest.mark.parametrize("at", range(1, len(RECORDS) - 1))
def test_moved_and_repeated_records_are_noticed(at):
    blocks = frame(RECORDS, FIRST)[0]
    swapped = [*blocks[:at], blocks[at + 1], blocks[at], *blocks[at + 2 :]]
    with pytest.raises(OutboxCorrupt):
        read(b"".join(swapped))
    with pytest.raises(OutboxCorrupt):
        read(b"".join([*blocks[:at], blocks[at], *blocks[at:]]))


def test_digest_and_header_check_are_each_chained():
    # Either chain alone would notice a moved record; each is to do so without the other.
    assert _digest(b"body", FIRST) != _digest(b"body", b"\1" * 16)
    assert _check(b"front", FIRST) != _check(b"front", b"\1" * 16)


def test_a_whole_record_of_another_log_is_noticed():
    other = frame([META, Entry(1, "other", "{}"), Entry(2, "other", "{}")], FIRST)[0]
    ours = frame([META, Entry(1, "ours", "{}")], FIRST)[0]
    with pytest.raises(OutboxCorrupt):
        read(b"".join([*ours, other[2]]))


@pytest.mark.parametrize("size", [1, HEADER_BYTES - 1, HEADER_BYTES, 4096])
def test_zeros_behind_the_last_record_are_no_record_cut_short(size):
    with pytest.raises(OutboxCorrupt) as caught:
        read(log_of(*RECORDS) + bytes(size))
    assert caught.value.data == {"path": "x.log", "offset": len(log_of(*RECORDS))}


def test_a_hole_inside_the_last_body_is_no_record_cut_short():
    data = log_of(*RECORDS)
    with pytest.raises(OutboxCorrupt):
        read(data[:-10] + bytes(10))


@pytest.mark.parametrize(
    "impossible",
    [
        Entry(2, "op", "{}"),
        Entry(4, "op", "{}"),
        Settle([2]),
        Settle([1, 1]),
        Reject(2, "r", "", renumber=False),
        Reject(5, "r", "", renumber=True),
        Advance(2, 9),
        Advance(3, 2),
        META,
    ],
)
def test_a_whole_record_that_no_outbox_would_write_there_is_refused(impossible):
    good = [META, Entry(1, "op", "{}"), Entry(2, "op", "{}"), Settle([2])]
    with pytest.raises(OutboxCorrupt) as caught:
        read(log_of(*good, impossible))
    assert caught.value.data["offset"] == len(log_of(*good))


def test_no_operation_moves_onto_the_sequence_of_a_settled_one():
    good = [META, *(Entry(n, "op", "{}") for n in (1, 2, 3)), Settle([2])]
    with pytest.raises(OutboxCorrupt):
        read(log_of(*good, Reject(1, "r", "", renumber=True)))


def test_a_log_must_begin_with_whose_it_is():
    with pytest.raises(OutboxCorrupt):
        read(log_of(Entry(1, "op", "{}")))
    with pytest.raises(OutboxCorrupt):
        read(b"")


def test_a_newer_version_is_named_and_not_called_corrupt():
    with pytest.raises(ConfigurationError) as caught:
        read(log_of(Meta(2, "e", "s", "p", 0, "00", 1)))
    assert "version 2" in caught.value.detail


def test_whose_it_is_comes_before_whether_the_rest_is_whole():
    def refuse(meta):
        assert meta == META
        raise PermissionDenied

    with pytest.raises(PermissionDenied):
        read_log(log_of(META) + b"rubbish", PATH, refuse)


def test_the_shortest_log_says_the_same():
    backlog, _, _ = read(log_of(*RECORDS))
    again, _, _ = read(log_of(*backlog.snapshot()))
    assert told(again) == told(backlog)


def test_an_empty_backlog_still_knows_its_next_sequence():
    backlog, _, _ = read(log_of(META, Entry(1, "op", "{}"), Settle([1])))
    again, _, _ = read(log_of(*backlog.snapshot()))
    assert (list(again.entries), again.next_sequence) == ([], 2)


def test_renumbering_keeps_the_pending_bytes_exact_where_a_digit_is_lost():
    backlog, _, _ = read(log_of(META, Advance(3, 9), *(Entry(n, "op", "{}") for n in (9, 10, 11))))
    backlog.apply(Reject(9, "r", "", renumber=True), 0)
    assert list(backlog.entries) == [9, 10]
    assert backlog.pending_bytes == sum(map(framed_size, backlog.entries.values()))


@pytest.mark.parametrize(("payload", "kept"), [("{}", REJECTED_KEPT), ("x" * (REJECTED_BYTES // 4), 3)])
def test_of_the_rejected_a_bounded_number_and_size_is_kept(payload, kept):
    backlog = Backlog(META)
    for n in range(REJECTED_KEPT + 5):
        backlog.apply(Rejected(n, "op", payload, "r", ""), 0)
    assert [item.sequence for item in backlog.rejected] == list(range(REJECTED_KEPT + 5 - kept, REJECTED_KEPT + 5))


def test_one_rejected_operation_is_kept_however_large():
    backlog = Backlog(META)
    backlog.apply(Rejected(1, "op", "x" * REJECTED_BYTES, "r", ""), 0)
    assert len(backlog.rejected) == 1


def test_text_that_utf8_cannot_carry_is_refused():
    with pytest.raises(InvalidParams):
        frame([Entry(1, "op", "\ud800")], FIRST)


def test_a_record_longer_than_a_header_can_say_is_refused(monkeypatch):
    monkeypatch.setattr(journal, "_LONGEST", 100)
    with pytest.raises(InvalidParams):
        frame([Entry(1, "op", "x" * 100)], FIRST)


def test_a_record_shows_its_size_and_never_its_payload():
    shown = repr(Entry(1, "op", '{"secret":"hush"}'))
    assert shown == "Entry(sequence=1, operation='op', payload=<17 chars>)"
    assert "hush" not in repr(Rejected(1, "op", "hush", "r", "d"))
