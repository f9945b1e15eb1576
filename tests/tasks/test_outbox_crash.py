"""Whatever dies, and wherever: each append that returned is there, and no one else can hold the outbox meanwhile."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tenure.ledger.errors import Unavailable
from tenure.tasks import backlog as backlog_module
from tenure.tasks import durable_backlog, journal_file
from tenure.tasks.backlog import read_log
from tenure.tasks.outbox import Outbox, Scope

SCOPE = Scope("e", "s", "p")
DIGEST = "ab" * 32
PRELUDE = """
import os, signal, sys
from pathlib import Path
from tenure.ledger.errors import PermissionDenied, Unavailable
from tenure.tasks.outbox import Outbox, Scope

def open_box(**options):
    return Outbox.open(Path(sys.argv[1]), Scope("e", "s", "p"), secret_digest="ab" * 32, **options)

def say(*words):
    print(*words, flush=True)
"""
WRITER = """
point, hits = sys.argv[2], int(sys.argv[3])

def fault(name):
    global hits
    hits -= name == point
    if hits == 0:
        os.kill(os.getpid(), signal.SIGKILL)

box = open_box(compact_bytes=1500, fault=fault)
for n in range(1, int(sys.argv[4]) + 1):
    say("appending", n)
    assert box.append("op", f'"{n}"' + " " * 100).sequence == n
    say("appended", n)
    if n % 5:
        say("settling", n)
        box.settle(n)
        say("settled", n)
"""


@contextmanager
def start(body, *arguments, **options):
    """Run a script in a group of its own, which ends here whatever happens: forks may hang where the code is wrong."""
    command = [sys.executable, "-c", PRELUDE + body, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0, **options) as process:
        try:
            yield process
            process.wait()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)


def judge(directory, lines):
    """Compare what the dead writer said with what its successor finds."""
    said = {word: [] for word in ("appending", "appended", "settling", "settled")}
    for line in lines:
        word, n = line.split()
        said[word].append(int(n))
    with Outbox.open(directory, SCOPE, secret_digest=DIGEST) as outbox:
        found = [entry.sequence for entry in outbox.pending()]
        assert all(entry.payload.strip() == f'"{entry.sequence}"' for entry in outbox.pending())
        assert found == sorted(found)
        assert set(said["appended"]) - set(said["settling"]) <= set(found)
        assert set(found) <= set(said["appending"]) - set(said["settled"])
        assert len(said["appended"]) + 1 <= outbox.next_sequence <= len(said["appending"]) + 1
        assert not list(outbox.path.parent.glob("*.tmp"))
        assert outbox.append("op", "{}").sequence == outbox.next_sequence - 1
    return found


@pytest.mark.parametrize("point", ["before_journal", "after_journal", "before_rename", "after_rename"])
@pytest.mark.parametrize("hit", [1, 3])
def test_killed_at_a_crash_point_it_keeps_each_append_that_had_returned(tmp_path, point, hit):
    with start(WRITER, tmp_path, point, hit, 200) as writer:
        lines = writer.stdout.readlines()
    assert writer.returncode == -signal.SIGKILL
    assert list((tmp_path / "outbox").glob("*.tmp")) == [tmp_path / "outbox/e.tmp"] * (point == "before_rename")
    found = judge(tmp_path, lines)
    if point.endswith("_journal"):  # a record is there from the write on, and not before
        assert (int(lines[-1].split()[1]) in found) == (point == "after_journal")


@pytest.mark.parametrize("after", [1, 2, 3, 17, 58, 113, 240, 501])
def test_killed_anywhere_it_keeps_each_append_that_had_returned(tmp_path, after):
    with start(WRITER, tmp_path, "none", -1, 100_000) as writer:
        lines = [writer.stdout.readline() for _ in range(after)]
        writer.kill()
        lines += [line for line in writer.stdout if line.endswith("\n")]
    judge(tmp_path, lines)


def test_stopped_with_the_outbox_open_it_still_holds_it(tmp_path):
    with start("box = open_box(); say('open'); sys.stdin.read()", tmp_path, stdin=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == "open\n"
        holder.send_signal(signal.SIGSTOP)
        with pytest.raises(Unavailable) as caught:
            Outbox.open(tmp_path, SCOPE, secret_digest=DIGEST)
        assert "open already" in caught.value.detail
        holder.kill()
        holder.wait()
        with Outbox.open(tmp_path, SCOPE, secret_digest=DIGEST) as outbox:
            assert outbox.pending() == []


def test_a_forked_child_can_neither_use_nor_release_its_parents_outbox(tmp_path):
    script = """
box = open_box()
box.append("op", "{}")
child = os.fork()
if child == 0:
    refused = 0
    for use in (box.pending, box.rejected, box.unlink, box.__enter__().pending, lambda: box.append("op", "{}"),
                lambda: box.settle(1), lambda: box.reject(1, "", ""), lambda: box.drop(1, "", ""),
                lambda: box.advance(generation=9), lambda: box.next_sequence, lambda: box.generation):
        try:
            use()
        except PermissionDenied as error:
            refused += "fork" in error.detail
    box.close()
    box.close()
    sys.exit(refused)
say("refused", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
try:
    open_box()
except Unavailable:
    say("held")
box.append("op", "{}")
say("pending", len(box.pending()))
"""
    with start(script, tmp_path) as parent:
        assert parent.stdout.read() == "refused 11\nheld\npending 2\n"


def test_a_fork_while_another_thread_holds_it_does_not_hang_the_child(tmp_path):
    script = """
import threading
reached, go_on = threading.Event(), threading.Event()

def fault(point):
    if point == "before_journal":
        reached.set()
        go_on.wait()

box = open_box(fault=fault)
thread = threading.Thread(target=box.append, args=("op", "{}"))
thread.start()
reached.wait()
child = os.fork()
if child == 0:
    try:
        box.pending()
    except PermissionDenied:
        box.close()
        os._exit(7)
    os._exit(1)
say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
go_on.set()
thread.join()
say(len(box.pending()))
"""
    with start(script, tmp_path) as parent:
        assert parent.stdout.read() == "7\n1\n"


def test_a_child_that_outlives_its_parent_does_not_hold_its_outbox(tmp_path):
    script = """
box = open_box()
box.append("op", "{}")
if os.fork() == 0:
    say("alive")
    sys.stdin.read()
    os._exit(0)
os._exit(0)
"""
    with start(script, tmp_path, stdin=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == "alive\n"
        parent.wait()
        with Outbox.open(tmp_path, SCOPE, secret_digest=DIGEST) as outbox:
            assert len(outbox.pending()) == 1
        parent.stdin.close()
        assert parent.stdout.read() == ""  # the child has left


class Machine:
    """What a power loss would leave: bytes that were synced, under a name whose folder was synced."""

    def __init__(self, monkeypatch):
        self.synced, self.named, self.syncs = {}, {}, []
        self.path = None
        for name in ("fdatasync", "fsync"):
            if real := getattr(os, name, None):
                monkeypatch.setattr(os, name, lambda fd, real=real: self.sync(fd, real))

    def sync(self, fd, real):
        real(fd)
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode):
            self.synced[status.st_ino] = os.pread(fd, status.st_size, 0)
            self.syncs.append("file")
        else:
            self.syncs.append("folder")
            for entry in os.scandir(fd):
                self.named[status.st_ino, entry.name] = entry.inode()

    def left(self):
        folder = self.path.parent
        assert self.named[folder.parent.stat().st_ino, folder.name] == folder.stat().st_ino
        data = self.synced[self.named[folder.stat().st_ino, self.path.name]]
        return read_log(data, self.path, lambda meta: None)[0]


def test_each_append_that_returned_survives_a_power_loss(tmp_path, monkeypatch):
    machine = Machine(monkeypatch)
    with Outbox.open(tmp_path / "new", SCOPE, secret_digest=DIGEST, compact_bytes=800) as outbox:
        machine.path, rewritten = outbox.path, set()
        for n in range(1, 60):
            machine.syncs.clear()
            outbox.append("op", "x" * 50)
            assert machine.syncs == ["file"]
            left = machine.left()
            assert left.next_sequence == n + 1
            assert left.entries.keys() >= {entry.sequence for entry in outbox.pending()}
            if n % 3:
                outbox.settle(n)
            rewritten.add(outbox.path.stat().st_ino)
            assert machine.left().next_sequence == n + 1
        assert len(rewritten) > 1


def test_many_appends_cost_one_wait_for_the_disk_and_settling_none(tmp_path, monkeypatch):
    machine = Machine(monkeypatch)
    with Outbox.open(tmp_path, SCOPE, secret_digest=DIGEST) as outbox:
        machine.syncs.clear()
        outbox.append_many([("op", "{}")] * 50)
        assert machine.syncs == ["file"]
        outbox.settle_many(range(1, 20))
        outbox.append_many([])
        assert machine.syncs == ["file"]
        for change in (
            lambda: outbox.reject(20, "r", ""),
            lambda: outbox.drop(20, "r", ""),
            lambda: outbox.advance(generation=2),
        ):
            machine.syncs.clear()
            change()
            assert machine.syncs == ["file"]


def test_what_a_killed_writer_had_not_synced_is_synced_before_it_is_believed(tmp_path, monkeypatch):
    with Outbox.open(tmp_path, SCOPE, secret_digest=DIGEST) as outbox:
        outbox.append("op", "{}")
    machine = Machine(monkeypatch)
    with Outbox.open(tmp_path, SCOPE, secret_digest=DIGEST) as outbox:
        machine.path = outbox.path
        assert list(machine.left().entries) == [1]


class Interrupt(BaseException):
    """What a signal handler raises: a time limit of Celery, Control-C."""


class Interrupter:
    """Raises at the nth line that runs in the modules which change the outbox."""

    # Not in the two context managers around a change: an exception between a lock's taking and its block
    # is Python's own open question, and no code of ours decides it.
    OUTSIDE = ("reading", "writing")
    FILES = frozenset(module.__file__ for module in (backlog_module, durable_backlog, journal_file))

    def __init__(self, lines):
        self.lines = lines

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.trace)

    def __exit__(self, *error):
        sys.settrace(self.before)

    def trace(self, frame, event, argument):
        code = frame.f_code
        if code.co_filename not in self.FILES or code.co_name in self.OUTSIDE:
            return None
        if event == "line":
            self.lines -= 1
            if self.lines == 0:
                raise Interrupt
        return self.trace


def told(outbox):
    held = ([(entry.sequence, entry.payload) for entry in outbox.pending()], outbox.next_sequence)
    return (*held, len(outbox.rejected()), outbox.pending_bytes)


CHANGES = {
    "append": lambda outbox: outbox.append("op", '"new"'),
    "settle": lambda outbox: outbox.settle_many([2, 3]),
    "reject": lambda outbox: outbox.reject(3, "r", ""),
    "drop": lambda outbox: outbox.drop(2, "r", ""),
    "advance": lambda outbox: outbox.advance(generation=4, next_sequence=20),
}


@pytest.mark.parametrize("compact_bytes", [0, 2**20])
@pytest.mark.parametrize("name", CHANGES)
def test_an_exception_at_any_line_of_a_change_leaves_it_done_or_undone(tmp_path, name, compact_bytes):
    lines, finished = 0, False
    while not finished:
        lines += 1
        directory = tmp_path / str(lines)
        with Outbox.open(directory, SCOPE, secret_digest=DIGEST, compact_bytes=compact_bytes) as outbox:
            outbox.append_many([("op", f'"{n}"') for n in range(1, 6)])
            outbox.settle(1)
            undone = told(outbox)
            try:
                with Interrupter(lines):
                    CHANGES[name](outbox)
                finished = True
            except Interrupt:
                pass
            now = told(outbox)
            if now == undone:
                CHANGES[name](outbox)
            done = told(outbox)
            assert done != undone
            assert now in (undone, done)
            assert outbox.append("op", '"after"').sequence == done[1]
            last = told(outbox)
        with Outbox.open(directory, SCOPE, secret_digest=DIGEST) as outbox:
            assert told(outbox) == last
            assert [path.name for path in sorted(Path(outbox.path.parent).iterdir())] == ["e.lock", "e.log"]
    assert lines > 20
