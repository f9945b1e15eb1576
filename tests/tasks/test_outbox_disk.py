"""The outbox and its disk: private files, links, a full or failing disk."""

from __future__ import annotations

import errno
import logging
import os
import stat
import subprocess
import sys

import pytest

from tenure.ledger.errors import Action, ConfigurationError, Unavailable
from tenure.tasks.outbox import Outbox, Scope

SCOPE = Scope("e", "s", "p")
DIGEST = "ab" * 32
SYNC = "fdatasync" if hasattr(os, "fdatasync") else "fsync"


def open_box(directory, **options):
    return Outbox.open(directory, SCOPE, secret_digest=DIGEST, **options)


@pytest.fixture
def made(tmp_path):
    """A closed outbox with one operation; returns its folder."""
    with open_box(tmp_path) as outbox:
        outbox.append("op", '"first"')
    return tmp_path / "outbox"


def payloads(outbox):
    return [entry.payload for entry in outbox.pending()]


def fail(monkeypatch, name, code, *, times=None, when=lambda *arguments: True):
    """Let `os.NAME` fail with an errno, at most `times` times."""
    real, left = getattr(os, name), [times]

    def failing(*arguments, **options):
        if when(*arguments) and left[0] != 0:
            left[0] = left[0] and left[0] - 1
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    monkeypatch.setattr(os, name, failing)


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_everything_is_made_for_its_owner_only(tmp_path, umask):
    before = os.umask(umask)
    try:
        with open_box(tmp_path / "state" / "deep", compact_bytes=0) as outbox:
            outbox.append_many([("op", "{}")] * 2)
            outbox.settle(1)
            folder = outbox.path.parent
            assert (mode(folder.parent), mode(folder)) == (0o700, 0o700)
            assert {path.name: mode(path) for path in folder.iterdir()} == {"e.log": 0o600, "e.lock": 0o600}
    finally:
        os.umask(before)


@pytest.mark.parametrize("bits", [0o710, 0o701, 0o750, 0o755, 0o770, 0o777])
def test_a_folder_that_others_may_enter_is_refused(made, bits):
    made.chmod(bits)
    with pytest.raises(ConfigurationError) as caught:
        open_box(made.parent)
    assert f"{made} gives others access" in caught.value.detail


@pytest.mark.parametrize("bits", [0o720, 0o702, 0o777])
def test_a_folder_that_others_may_exchange_is_refused(made, bits):
    made.parent.chmod(bits)
    with pytest.raises(ConfigurationError) as caught:
        open_box(made.parent)
    assert str(made.parent) in caught.value.detail


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o620, 0o666])
@pytest.mark.parametrize("name", ["e.log", "e.lock"])
def test_a_file_that_others_may_read_or_write_is_refused(made, name, bits):
    (made / name).chmod(bits)
    with pytest.raises(ConfigurationError) as caught:
        open_box(made.parent)
    assert f"{made / name} gives others access" in caught.value.detail
    (made / name).chmod(0o600)
    with open_box(made.parent) as outbox:  # and the refusal has released the lock
        assert payloads(outbox) == ['"first"']


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("name", ["", "e.log", "e.lock", ".."])
def test_what_belongs_to_another_user_is_refused(made, name):
    os.chown(made / name, 65534, -1)
    with pytest.raises(ConfigurationError):
        open_box(made.parent)


@pytest.mark.parametrize("name", ["e.log", "e.lock"])
@pytest.mark.parametrize("dangling", [True, False])
def test_a_link_in_the_place_of_a_file_is_not_followed(made, name, dangling):
    target = made.parent / "target"
    (made / name).rename(target)
    if dangling:
        target.unlink()
    (made / name).symlink_to(target)
    with pytest.raises(ConfigurationError) as caught:
        open_box(made.parent)
    assert str(made / name) in caught.value.detail
    assert target.exists() is not dangling


def test_a_link_in_the_place_of_the_temporary_file_is_removed_and_not_followed(made):
    target = made.parent / "target"
    target.write_text("precious")
    (made / "e.tmp").symlink_to(target)
    with open_box(made.parent, compact_bytes=0) as outbox:
        (made / "e.tmp").symlink_to(target)
        outbox.settle(1)
    assert target.read_text() == "precious"
    assert not (made / "e.tmp").is_symlink()
    assert not (made / "e.log").is_symlink()


def test_a_temporary_file_that_will_not_go_is_never_written_into(made, monkeypatch):
    with open_box(made.parent, compact_bytes=0) as outbox:
        (made / "e.tmp").write_text("another's" * 100)
        fail(monkeypatch, "unlink", errno.ENOENT)  # it was gone, and there again
        assert outbox.settle(1)
        assert (made / "e.tmp").read_text() == "another's" * 100
        assert outbox.append("op", "{}").sequence == 2


@pytest.mark.parametrize("target_exists", [True, False])
def test_a_link_in_the_place_of_the_folder_is_not_followed(made, target_exists):
    target = made.parent / "target"
    if target_exists:
        made.rename(target)
    else:
        for path in made.iterdir():
            path.unlink()
        made.rmdir()
    made.symlink_to(target)
    with pytest.raises(ConfigurationError):
        open_box(made.parent)
    assert target.exists() is target_exists


def test_a_link_in_the_place_of_the_folder_above_is_not_followed(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir(mode=0o700)
    link.symlink_to(real)
    with pytest.raises(ConfigurationError):
        open_box(link)
    assert list(real.iterdir()) == []


def test_a_link_further_up_is_the_users_own_affair(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with open_box(tmp_path / "link" / "state") as outbox:
        outbox.append("op", "{}")
    assert (tmp_path / "real/state/outbox/e.log").exists()


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_regular_file_is_refused(made, kind):
    (made / "e.log").unlink()
    if kind == "folder":
        (made / "e.log").mkdir()
    else:
        os.mkfifo(made / "e.log", 0o600)
    with pytest.raises(Unavailable if kind == "folder" else ConfigurationError) as caught:
        open_box(made.parent)
    assert str(made / "e.log") in caught.value.detail


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "outbox").touch(mode=0o700)
    with pytest.raises(ConfigurationError):
        open_box(tmp_path)


def test_the_folder_stays_the_same_when_the_process_moves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_box(tmp_path.relative_to(tmp_path) / "state", compact_bytes=0) as outbox:
        assert outbox.path == tmp_path / "state/outbox/e.log"
        monkeypatch.chdir("/")
        outbox.append("op", "{}")
        outbox.settle(1)
        outbox.append("op", '"second"')
    with open_box(tmp_path / "state") as outbox:
        assert payloads(outbox) == ['"second"']


def test_a_full_disk_takes_back_half_a_record_and_goes_on_when_there_is_room(tmp_path, made, monkeypatch):
    real = os.pwrite
    with open_box(tmp_path) as outbox, monkeypatch.context() as full:
        before = outbox.path.read_bytes()
        full.setattr(os, "pwrite", lambda fd, data, offset: real(fd, bytes(data)[: len(data) // 2], offset))
        fail(full, "pwrite", errno.ENOSPC, when=lambda fd, data, offset: offset > len(before))
        with pytest.raises(Unavailable) as caught:
            outbox.append_many([("op", "x" * 500)] * 2)
        assert caught.value.detail == f"cannot write {outbox.path}: {os.strerror(errno.ENOSPC)}"
        assert caught.value.data == {"path": str(outbox.path), "errno": errno.ENOSPC}
        assert caught.value.action is Action.LATER
        assert outbox.path.read_bytes() == before
        assert (payloads(outbox), outbox.next_sequence) == (['"first"'], 2)
        for change in (
            lambda: outbox.settle(1),
            lambda: outbox.reject(1, "r", ""),
            lambda: outbox.drop(1, "r", ""),
            lambda: outbox.advance(generation=2),
        ):
            with pytest.raises(Unavailable):
                change()
            assert outbox.path.read_bytes() == before
            assert (payloads(outbox), outbox.generation, outbox.rejected()) == (['"first"'], 0, [])
        full.undo()
        outbox.append("op", "2")
    with open_box(tmp_path) as outbox:
        assert payloads(outbox) == ['"first"', "2"]


def test_a_file_size_limit_is_a_full_disk(tmp_path):
    script = """
import resource, sys
from pathlib import Path
from tenure.ledger.errors import Unavailable
from tenure.tasks.outbox import Outbox, Scope
box = Outbox.open(Path(sys.argv[1]), Scope("e", "s", "p"), secret_digest="ab" * 32)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
kept = 0
try:
    while True:
        box.append("op", "x" * 100)
        kept += 1
except Unavailable as error:
    assert error.detail.startswith(f"cannot write {box.path}: "), error.detail
assert len(box.pending()) == kept > 5
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
box.append("op", "y")
print(kept)
"""
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    with open_box(tmp_path) as outbox:
        assert payloads(outbox) == ["x" * 100] * int(result.stdout) + ["y"]


def test_what_cannot_be_taken_back_closes_the_outbox_until_it_is_opened_again(tmp_path, made, monkeypatch):
    real = os.pwrite
    with open_box(tmp_path) as outbox:
        good = outbox.path.stat().st_size
        with monkeypatch.context() as broken:
            broken.setattr(os, "pwrite", lambda fd, data, offset: real(fd, bytes(data)[:40], offset))
            fail(broken, "pwrite", errno.EIO, when=lambda fd, data, offset: offset > good)
            fail(broken, "ftruncate", errno.EIO)
            with pytest.raises(Unavailable):
                outbox.append("op", "x" * 500)
        assert outbox.path.stat().st_size == good + 40
        for change in (
            lambda: outbox.append("op", "{}"),
            lambda: outbox.settle(1),
            lambda: outbox.advance(generation=1),
        ):
            with pytest.raises(Unavailable) as caught:
                change()
            assert f"{outbox.path} holds half a record" in caught.value.detail
        assert payloads(outbox) == ['"first"']
        assert outbox.path.stat().st_size == good + 40
    with open_box(tmp_path) as outbox:
        assert payloads(outbox) == ['"first"']
        assert outbox.append("op", "{}").sequence == 2


def test_after_a_failed_sync_the_log_is_written_anew_before_anything_is_promised(tmp_path, made, monkeypatch):
    with open_box(tmp_path) as outbox:
        outbox.append("op", "2")
        outbox.settle(1)
        inode = outbox.path.stat().st_ino
        with monkeypatch.context() as failing:
            fail(failing, SYNC, errno.EIO)
            with pytest.raises(Unavailable):
                outbox.append("op", "lost")
            assert payloads(outbox) == ["2"]
            fail(failing, "fsync", errno.EIO)
            with pytest.raises(Unavailable):
                outbox.append("op", "lost")
            with pytest.raises(Unavailable):
                outbox.settle(2)
        assert (payloads(outbox), outbox.next_sequence) == (["2"], 3)
        assert not (made / "e.tmp").exists()
        outbox.append("op", "3")
        assert outbox.path.stat().st_ino != inode
    with open_box(tmp_path) as outbox:
        assert payloads(outbox) == ["2", "3"]


def test_a_rename_that_may_not_last_is_repeated_before_anything_is_promised(tmp_path, made, monkeypatch):
    def is_folder(fd):
        return stat.S_ISDIR(os.fstat(fd).st_mode)

    with open_box(tmp_path, compact_bytes=0) as outbox:
        outbox.append("op", "2")
        with monkeypatch.context() as failing:
            fail(failing, "fsync", errno.EIO, when=is_folder)
            assert outbox.settle(1)  # the receipt is recorded; only the compaction failed
            with pytest.raises(Unavailable):
                outbox.append("op", "lost")
            assert payloads(outbox) == ["2"]
        outbox.append("op", "3")
    with open_box(tmp_path) as outbox:
        assert payloads(outbox) == ["2", "3"]


def test_a_compaction_without_room_is_put_off_and_told(tmp_path, monkeypatch, caplog):
    with open_box(tmp_path, compact_bytes=1000) as outbox:
        outbox.append_many([("op", "x" * 100)] * 40)
        with monkeypatch.context() as full:
            fail(full, "pwrite", errno.ENOSPC, when=lambda fd, data, offset: offset == 0)
            with caplog.at_level(logging.WARNING):
                for n in range(1, 36):
                    assert outbox.settle(n)
        assert 1 <= len(caplog.records) <= 5
        assert f"outbox not compacted: unavailable: cannot write {outbox.path}" in caplog.text
        assert not outbox.path.with_suffix(".tmp").exists()
        for n in range(36, 41):
            assert outbox.settle(n)
        long = outbox.path.stat().st_size
        outbox.append_many([("op", "x" * 100)] * 10)
        outbox.settle_many(range(41, 51))
        assert outbox.path.stat().st_size < long
    with open_box(tmp_path) as outbox:
        assert (payloads(outbox), outbox.next_sequence) == ([], 51)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_disk_that_takes_no_new_file_is_one_clear_line(tmp_path, monkeypatch, code):
    fail(monkeypatch, "mkdir", code)
    with pytest.raises(Unavailable) as caught:
        open_box(tmp_path)
    assert caught.value.explain() == f"unavailable: cannot open {tmp_path / 'outbox'}: {os.strerror(code)}"


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
@pytest.mark.parametrize(("suffix", "doing"), [(".log", "open"), (".lock", "lock")])
def test_a_read_only_disk_is_one_clear_line(made, monkeypatch, code, suffix, doing):
    fail(monkeypatch, "open", code, when=lambda path, *rest: str(path).endswith(suffix))
    with pytest.raises(Unavailable) as caught:
        open_box(made.parent)
    assert caught.value.explain() == f"unavailable: cannot {doing} {made / ('e' + suffix)}: {os.strerror(code)}"


def test_a_creation_that_fails_leaves_nothing_and_can_be_repeated(tmp_path, monkeypatch):
    with monkeypatch.context() as full:
        fail(full, "pwrite", errno.ENOSPC)
        with pytest.raises(Unavailable):
            open_box(tmp_path)
    assert [path.name for path in (tmp_path / "outbox").iterdir()] == ["e.lock"]
    with open_box(tmp_path) as outbox:
        assert outbox.next_sequence == 1


def test_an_outbox_removed_under_its_user_promises_nothing_more(made):
    with open_box(made.parent) as outbox:
        (made / "e.log").unlink()
        with pytest.raises(Unavailable) as caught:
            outbox.append("op", "{}")
        assert caught.value.detail == f"cannot write {outbox.path}: it was removed while open"
        assert payloads(outbox) == ['"first"']


def test_what_was_removed_in_the_middle_of_a_change_is_not_made_anew(made, monkeypatch):
    def interrupt(fd, data, offset):
        raise KeyboardInterrupt

    with open_box(made.parent) as outbox:
        with monkeypatch.context() as interrupted:
            interrupted.setattr(os, "pwrite", interrupt)
            with pytest.raises(KeyboardInterrupt):
                outbox.append("op", "{}")
        (made / "e.log").unlink()
        for use in (outbox.pending, lambda: outbox.append("op", "{}"), outbox.pending):
            with pytest.raises(Unavailable) as caught:
                use()
            assert caught.value.detail == f"{outbox.path} was removed while open"


def test_a_removal_that_fails_closes_all_the_same(made, monkeypatch):
    outbox = open_box(made.parent)
    outbox.settle(1)
    with monkeypatch.context() as failing:
        fail(failing, "unlink", errno.EACCES)
        with pytest.raises(Unavailable):
            outbox.unlink()
    with open_box(made.parent) as outbox:
        assert outbox.next_sequence == 2
