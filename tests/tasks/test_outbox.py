"""The outbox as its users see it: what is appended stays until it is settled, in order, under one number."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tenure.ledger.claims import secret_digest
from tenure.ledger.errors import (
    Action,
    AdmissionConflict,
    ConfigurationError,
    InvalidParams,
    OutboxCorrupt,
    OutboxFull,
    PermissionDenied,
    StaleGeneration,
    TenureError,
    Unavailable,
    from_wire,
    to_wire,
)
from tenure.tasks.journal import framed_size
from tenure.tasks.outbox import Entry, Outbox, Scope
from tenure.tasks.outbox_scope import first_record, refuse_other

SCOPE = Scope("exec-1", "session-1", "default")
SECRET = "a secret of sixteen characters"
DIGEST = secret_digest(SECRET)


@pytest.fixture
def reopen(tmp_path):
    """Opens the outbox, having closed the one opened before."""
    opened = []

    def again(scope=SCOPE, digest=DIGEST, **options):
        if opened:
            opened.pop().close()
        opened.append(Outbox.open(tmp_path, scope, secret_digest=digest, **options))
        return opened[-1]

    yield again
    if opened:
        opened.pop().close()


def numbers(outbox):
    return [entry.sequence for entry in outbox.pending()]


def test_what_was_appended_is_pending_in_order_and_after_reopening(reopen):
    outbox = reopen()
    appended = [outbox.append("transcript.append", f'{{"n":{n}}}') for n in range(5)]
    assert appended == [Entry(n + 1, "transcript.append", f'{{"n":{n}}}') for n in range(5)]
    assert outbox.pending() == appended
    outbox = reopen()
    assert (outbox.pending(), outbox.next_sequence) == (appended, 6)


def test_payloads_come_back_to_the_character(reopen):
    payloads = ['{"a":"\\u0000\\n\\"é 🎉\\\\"}', "{}", '"' + "x" * 100_000 + '"']
    outbox = reopen()
    outbox.append_many([("op", payload) for payload in payloads])
    assert [entry.payload for entry in reopen().pending()] == payloads


def test_a_first_sequence_may_be_given_and_is_kept(reopen):
    assert reopen(first_sequence=41).append("op", "{}").sequence == 41
    assert reopen().next_sequence == 42


def test_settled_ones_are_gone_in_any_order_and_after_reopening(reopen):
    outbox = reopen()
    outbox.append_many([("op", "{}")] * 5)
    assert [outbox.settle(n) for n in (4, 1, 3)] == [True] * 3
    assert numbers(outbox) == [2, 5]
    assert numbers(reopen()) == [2, 5]


def test_a_receipt_may_come_twice_or_for_nothing_known(reopen):
    outbox = reopen()
    outbox.append("op", "{}")
    assert outbox.settle(1)
    length = outbox.path.stat().st_size
    assert not outbox.settle(1)
    assert not outbox.settle(99)
    assert outbox.settle_many([1, 99]) == []
    assert outbox.path.stat().st_size == length


def test_settling_many_writes_once_and_ignores_repeats(reopen):
    outbox = reopen()
    outbox.append_many([("op", "{}")] * 4)
    assert outbox.settle_many([3, 3, True, 1, 7, 1.0]) == [3, 1]
    assert numbers(reopen()) == [2, 4]


def test_sequences_go_on_after_everything_was_settled(reopen):
    outbox = reopen()
    outbox.append_many([("op", "{}")] * 3)
    outbox.settle_many([1, 2, 3])
    assert reopen().append("op", "{}").sequence == 4


def test_sequences_go_on_after_compaction(reopen):
    outbox = reopen(compact_bytes=0)
    outbox.append_many([("op", "{}")] * 3)
    outbox.settle_many([1, 2, 3])
    assert outbox.path.stat().st_size < 400
    assert reopen().append("op", "{}").sequence == 4


def test_a_window_of_the_pending_can_be_asked_for(reopen):
    outbox = reopen()
    outbox.append_many([("op", "{}")] * 6)
    outbox.settle(3)
    assert [entry.sequence for entry in outbox.pending(start=2, limit=3)] == [2, 4, 5]
    assert outbox.pending(start=7) == []
    assert outbox.pending(limit=0) == []


def test_rejecting_renumbers_those_behind_and_only_those(reopen):
    outbox = reopen()
    outbox.append_many([("op", f'"{letter}"') for letter in "abcde"])
    outbox.settle(1)
    assert outbox.reject(3, "invalid_params", "messages[0].role") == [(4, 3), (5, 4)]
    expected = [Entry(2, "op", '"b"'), Entry(3, "op", '"d"'), Entry(4, "op", '"e"')]
    assert outbox.pending() == expected
    assert outbox.append("op", '"f"').sequence == 5
    outbox = reopen()
    assert outbox.pending() == [*expected, Entry(5, "op", '"f"')]
    (rejected,) = outbox.rejected()
    assert (rejected.sequence, rejected.payload) == (3, '"c"')
    assert (rejected.reason, rejected.detail) == ("invalid_params", "messages[0].role")


def test_rejecting_the_last_gives_its_sequence_to_the_next(reopen):
    outbox = reopen()
    outbox.append("op", '"bad"')
    assert outbox.reject(1, "invalid_params", "") == []
    assert reopen().append("op", '"good"') == Entry(1, "op", '"good"')


def test_dropping_leaves_the_numbers_of_those_behind(reopen):
    outbox = reopen()
    outbox.append_many([("op", f'"{letter}"') for letter in "abc"])
    outbox.drop(2, "admission_conflict", "taken")
    assert numbers(outbox) == [1, 3]
    outbox = reopen()
    assert (numbers(outbox), outbox.next_sequence) == ([1, 3], 4)
    assert [item.payload for item in outbox.rejected()] == ['"b"']


def test_nothing_moves_onto_a_sequence_that_has_its_receipt(reopen):
    outbox = reopen()
    outbox.append_many([("op", "{}")] * 3)
    outbox.settle(2)
    with pytest.raises(AdmissionConflict):
        outbox.reject(1, "invalid_params", "")
    assert numbers(outbox) == [1, 3]


@pytest.mark.parametrize("how", ["reject", "drop"])
def test_only_what_is_pending_can_be_given_up(reopen, how):
    outbox = reopen()
    outbox.append("op", "{}")
    outbox.settle(1)
    with pytest.raises(InvalidParams):
        getattr(outbox, how)(1, "r", "")
    assert outbox.rejected() == []


@pytest.mark.parametrize("how", ["reject", "drop"])
def test_what_a_refusal_says_never_hinders_recording_it(reopen, how):
    outbox = reopen()
    outbox.append("op", "{}")
    getattr(outbox, how)(1, "r\udcff", "\ud800" + "x" * 10_000)
    (rejected,) = reopen().rejected()
    assert rejected.reason == "r\\udcff"
    assert rejected.detail.startswith("\\ud800x")
    assert len(rejected.detail) < 2010


def test_the_rejected_outlive_a_compaction(reopen):
    outbox = reopen(compact_bytes=0)
    outbox.append_many([("op", "x" * 100)] * 3)
    outbox.reject(2, "invalid_params", "why")
    outbox.settle_many([1, 2])
    assert [item.detail for item in reopen().rejected()] == ["why"]


def test_generation_and_next_sequence_rise_and_are_kept(reopen):
    outbox = reopen(generation=3)
    outbox.append("op", "{}")
    outbox.advance(generation=5, next_sequence=10)
    assert (outbox.generation, outbox.append("op", "{}").sequence) == (5, 10)
    outbox = reopen()
    assert (outbox.generation, numbers(outbox)) == (5, [1, 10])
    with pytest.raises(AdmissionConflict):
        outbox.reject(1, "invalid_params", "")


def test_a_predecessor_does_not_get_its_successors_outbox(reopen):
    reopen(generation=3).append("op", "{}")
    with pytest.raises(StaleGeneration) as caught:
        reopen(generation=2)
    assert caught.value.data == {"generation": 3}
    assert numbers(reopen(generation=3)) == [1]


def test_what_changes_nothing_is_not_written(reopen):
    outbox = reopen(generation=2, first_sequence=5)
    length = outbox.path.stat().st_size
    outbox.advance(generation=2, next_sequence=4)
    outbox.advance()
    assert outbox.append_many([]) == []
    assert outbox.path.stat().st_size == length


def test_the_cap_bounds_what_is_pending_and_settling_makes_room(reopen):
    size = framed_size(Entry(1, "op", "x" * 100))
    outbox = reopen(cap_bytes=3 * size)
    outbox.append_many([("op", "x" * 100)] * 3)
    before = outbox.path.read_bytes()
    with pytest.raises(OutboxFull) as caught:
        outbox.append("op", "")
    assert caught.value.data == {"cap": 3 * size, "pending": 3 * size, "needed": framed_size(Entry(4, "op", ""))}
    assert (caught.value.reason, caught.value.action) == ("outbox_full", Action.LATER)
    assert outbox.path.read_bytes() == before
    outbox.settle(2)
    assert outbox.append("op", "x" * 100).sequence == 4


def test_many_are_refused_together_when_not_all_fit(reopen):
    outbox = reopen(cap_bytes=300)
    with pytest.raises(OutboxFull):
        outbox.append_many([("op", "x" * 100)] * 3)
    assert (numbers(outbox), outbox.next_sequence, outbox.pending_bytes) == ([], 1, 0)


def test_a_lower_cap_lets_what_is_there_go_out(reopen):
    reopen().append_many([("op", "x" * 100)] * 3)
    outbox = reopen(cap_bytes=10)
    with pytest.raises(OutboxFull):
        outbox.append("op", "")
    assert outbox.settle_many([1, 2, 3]) == [1, 2, 3]


@pytest.mark.parametrize("item", [("", "{}"), (None, "{}"), ("op", None), ("op", b"{}"), ("op", {}), ("op", "\ud800")])
def test_what_no_record_can_hold_is_refused_and_does_no_harm(reopen, item):
    outbox = reopen()
    with pytest.raises(InvalidParams):
        outbox.append_many([("op", "{}"), item])
    assert outbox.append("op", "{}").sequence == 1
    assert numbers(reopen()) == [1]


@pytest.mark.parametrize("numbers", [{"generation": -1}, {"generation": True}, {"next_sequence": 0}])
def test_minima_are_whole_numbers(reopen, numbers):
    outbox = reopen()
    with pytest.raises(InvalidParams):
        outbox.advance(**numbers)


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "../a", "a\n", "a\0", "ä", "a b", "x" * 129, None, 7]
)
def test_an_execution_id_that_could_leave_the_folder_is_refused(tmp_path, name):
    with pytest.raises(InvalidParams):
        Outbox.open(tmp_path / "state", Scope(name, "s", "p"), secret_digest=DIGEST)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("name", ["x" * 128, "a..b", "-", "A_1.log", "a.tmp", "a.lock", "a"])
def test_every_allowed_execution_id_has_files_of_its_own(tmp_path, name):
    with (
        Outbox.open(tmp_path, Scope(name, "s", "p"), secret_digest=DIGEST) as outbox,
        Outbox.open(tmp_path, Scope("other", "s", "p"), secret_digest=DIGEST) as other,
    ):
        outbox.append("op", "{}")
        assert numbers(other) == []
        assert sorted(path.name for path in outbox.path.parent.iterdir()) == sorted(
            [f"{name}.log", f"{name}.lock", "other.log", "other.lock"]
        )


@pytest.mark.parametrize("digest", ["", "abc", SECRET, "A" * 64, DIGEST + "\n"])
def test_a_secret_in_the_place_of_its_digest_is_refused_unsaid(tmp_path, digest):
    with pytest.raises(InvalidParams) as caught:
        Outbox.open(tmp_path, SCOPE, secret_digest=digest)
    assert not digest or digest not in caught.value.explain()


def test_another_secret_is_refused_and_changes_nothing(reopen):
    outbox = reopen()
    outbox.append("op", "{}")
    outbox.close()
    with outbox.path.open("ab") as file:
        file.write(b"TnJ")  # cut short: the rightful opener would drop it
    before = outbox.path.read_bytes()
    with pytest.raises(PermissionDenied):
        reopen(digest=secret_digest("another secret of some length"))
    assert outbox.path.read_bytes() == before
    assert numbers(reopen()) == [1]


@pytest.mark.parametrize("other", [replace(SCOPE, session_id="x"), replace(SCOPE, profile="x")])
def test_another_scope_is_refused(reopen, other):
    reopen().append("op", "{}")
    with pytest.raises(PermissionDenied):
        reopen(scope=other)


@pytest.mark.parametrize("field", ["execution_id", "session_id", "profile"])
def test_the_scope_is_compared_as_written_and_as_verified(field):
    expected = first_record(SCOPE, DIGEST, 0, 1)
    with pytest.raises(PermissionDenied):
        refuse_other(expected, msgspec.structs.replace(expected, **{field: "x"}))
    with pytest.raises(PermissionDenied):
        refuse_other(expected, first_record(replace(SCOPE, **{field: "x"}), DIGEST, 0, 1))


def test_an_outbox_moved_to_another_executions_name_is_refused(reopen):
    outbox = reopen()
    outbox.append("op", "{}")
    shutil.copy(outbox.path, outbox.path.with_name("exec-2.log"))
    with pytest.raises(PermissionDenied):
        reopen(scope=replace(SCOPE, execution_id="exec-2"))


def test_neither_the_secret_nor_its_digest_is_on_disk(reopen):
    outbox = reopen(compact_bytes=0)
    outbox.append_many([("op", "{}")] * 3)
    outbox.reject(1, "r", "")
    outbox.settle(1)
    outbox.close()
    for path in outbox.path.parent.iterdir():
        data = path.read_bytes()
        assert SECRET.encode() not in data
        assert DIGEST.encode() not in data
        assert bytes.fromhex(DIGEST) not in data


def test_a_torn_last_record_is_dropped_and_the_next_append_takes_its_place(reopen):
    outbox = reopen()
    outbox.append("op", '"kept"')
    good = outbox.path.stat().st_size
    outbox.append("op", '"torn"')
    outbox.close()
    whole = outbox.path.read_bytes()
    for cut in range(good, len(whole)):
        outbox.path.write_bytes(whole[:cut])
        outbox = reopen()
        assert outbox.pending() == [Entry(1, "op", '"kept"')]
        assert outbox.path.stat().st_size == good
        outbox.append("op", "1")  # shorter than what was cut off
        assert reopen().pending() == [Entry(1, "op", '"kept"'), Entry(2, "op", "1")]


def test_a_corrupt_log_is_refused_by_name_and_offset_and_left_as_it_is(reopen):
    outbox = reopen()
    outbox.append_many([("op", "{}")] * 2)
    outbox.close()
    good = outbox.path.read_bytes()
    for at in range(len(good)):
        bad = good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :]
        outbox.path.write_bytes(bad)
        with pytest.raises(OutboxCorrupt) as caught:
            reopen()
        assert caught.value.data["path"] == str(outbox.path)
        assert f"{outbox.path} at byte {caught.value.data['offset']}: " in caught.value.detail
        assert outbox.path.read_bytes() == bad
    outbox.path.write_bytes(good)
    assert numbers(reopen()) == [1, 2]


@pytest.mark.parametrize("size", [0, 10, 200])
def test_a_log_without_its_whole_first_record_is_refused(reopen, size):
    outbox = reopen()
    outbox.close()
    data = outbox.path.read_bytes()[:size]
    outbox.path.write_bytes(data)
    with pytest.raises(OutboxCorrupt):
        reopen()
    assert outbox.path.read_bytes() == data


def test_the_log_stays_within_twice_what_is_pending_and_the_threshold(reopen):
    outbox = reopen(compact_bytes=5000)
    outbox.append("op", '"the slowest"')
    for _ in range(300):
        entry = outbox.append("op", "x" * 200)
        outbox.settle(entry.sequence)
        assert outbox.path.stat().st_size < 2 * outbox.pending_bytes + 5000 + 1000
    outbox = reopen()
    assert (numbers(outbox), outbox.next_sequence) == ([1], 302)


def test_a_large_backlog_is_not_rewritten_for_a_few_settled(reopen):
    outbox = reopen(compact_bytes=1000)
    outbox.append_many([("op", "x" * 200)] * 100)
    inode = outbox.path.stat().st_ino
    outbox.settle_many(range(1, 30))
    assert outbox.path.stat().st_ino == inode
    outbox.settle_many(range(30, 70))
    assert outbox.path.stat().st_ino != inode
    assert numbers(reopen()) == list(range(70, 101))


def test_kept_rejections_do_not_cause_a_rewrite_each_time(reopen):
    outbox = reopen(compact_bytes=1000)
    outbox.append_many([("op", "x" * 5000), *[("op", "{}")] * 20])
    outbox.reject(1, "r", "")
    inodes = set()
    for n in range(1, 10):
        outbox.settle(n)
        inodes.add(outbox.path.stat().st_ino)
    assert len(inodes) == 1


def test_a_second_opener_in_this_process_is_refused(tmp_path, reopen):
    outbox = reopen()
    with pytest.raises(Unavailable) as caught:
        Outbox.open(tmp_path, SCOPE, secret_digest=DIGEST)
    assert "open already" in caught.value.detail
    assert caught.value.data == {"path": str(outbox.path.with_suffix(".lock"))}
    outbox.append("op", "{}")


def test_a_refused_opening_does_not_keep_the_lock(reopen):
    reopen().append("op", "{}")
    for _ in range(3):
        with pytest.raises(PermissionDenied):
            reopen(digest="0" * 64)
    assert numbers(reopen()) == [1]


def test_nothing_is_left_open(reopen):
    def descriptors():
        return len(list(Path("/dev/fd").iterdir()))

    before = descriptors()
    outbox = reopen(compact_bytes=0)
    outbox.append_many([("op", "{}")] * 3)
    outbox.settle_many([1, 2])
    outbox.close()
    with pytest.raises(PermissionDenied):
        reopen(digest="0" * 64)
    outbox.path.write_bytes(b"rubbish")
    with pytest.raises(OutboxCorrupt):
        reopen()
    outbox.path.parent.chmod(0o755)
    with pytest.raises(ConfigurationError):
        reopen()
    assert descriptors() == before


def test_once_closed_it_refuses_everything_and_closes_again(reopen):
    outbox = reopen()
    outbox.append("op", "{}")
    outbox.close()
    outbox.close()
    for use in (
        outbox.pending,
        outbox.rejected,
        outbox.unlink,
        lambda: outbox.append("op", "{}"),
        lambda: outbox.settle(1),
        lambda: outbox.next_sequence,
    ):
        with pytest.raises(Unavailable):
            use()


def test_it_closes_with_its_block(tmp_path):
    with Outbox.open(tmp_path, SCOPE, secret_digest=DIGEST) as outbox:
        outbox.append("op", "{}")
    with Outbox.open(tmp_path, SCOPE, secret_digest=DIGEST) as outbox:
        assert numbers(outbox) == [1]


def test_the_crash_points_are_those_of_appending_and_compacting(reopen):
    points = []
    outbox = reopen(compact_bytes=0, fault=points.append)
    assert points == []
    outbox.append_many([("op", "{}")] * 2)
    assert points == ["before_journal", "after_journal"]
    outbox.settle(1)
    assert points[2:] == ["before_rename", "after_rename"]


def test_one_thread_may_close_what_another_has_opened(reopen):
    outbox = reopen()
    thread = threading.Thread(target=outbox.close)
    thread.start()
    thread.join()
    assert reopen().next_sequence == 1


def test_an_empty_outbox_can_be_removed_with_its_lock(reopen):
    outbox = reopen()
    outbox.append("op", "{}")
    with pytest.raises(InvalidParams):
        outbox.unlink()
    outbox.settle(1)
    outbox.unlink()
    assert list(outbox.path.parent.iterdir()) == []
    with pytest.raises(Unavailable):
        outbox.append("op", "{}")
    assert reopen().next_sequence == 1


def test_threads_append_and_settle_at_the_same_time(reopen):
    outbox = reopen(compact_bytes=2000)
    kept, errors = [], []

    def work(name):
        try:
            for n in range(40):
                entry = outbox.append("op", f'"{name}-{n}"')
                if n % 4:
                    assert outbox.settle(entry.sequence)
                else:
                    kept.append(entry)
        except (TenureError, AssertionError) as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    outbox = reopen()
    assert outbox.pending() == sorted(kept, key=lambda entry: entry.sequence)
    assert outbox.next_sequence == 161


@pytest.mark.parametrize("error", [OutboxFull("d", {"cap": 1}), OutboxCorrupt("d", {"path": "x", "offset": 1})])
def test_the_errors_survive_the_wire(error):
    again = from_wire(to_wire(error))
    assert (type(again), again.args) == (type(error), error.args)
