"""Who a process is and whether it lives: each outcome, on real processes where one can be had."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tenure.ledger.claims import Identity, claim_digest, secret_digest
from tenure.ledger.errors import NotFound, Unavailable
from tenure.tasks import liveness
from tenure.tasks.liveness import Admission, Life, Verdict, admit, check, identity_of, own_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

linux_only = pytest.mark.skipif(not liveness.LINUX, reason="reads /proc")
OWNER = 1


@contextlib.contextmanager
def child(*command: str, program: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run a process that says one line when it is there and is gone when the block ends."""
    process = subprocess.Popen(command, executable=program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def cat() -> Iterator[subprocess.Popen[str]]:
    """A process that lives for as long as its standard input is open."""
    with child("cat") as process:
        yield process


@pytest.fixture
def here() -> Identity:
    return own_identity()


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.005)


def make_zombie(process: subprocess.Popen[str]) -> None:
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is not reaped


def only_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "LINUX", False)


def fake_proc(root: Path, monkeypatch: pytest.MonkeyPatch, stats: dict[int, str | None]) -> None:
    """Put a process table in the place of /proc; a pid whose text is None cannot be read."""
    root.mkdir()
    (root / "self").symlink_to(str(os.getpid()))
    for pid, stat in stats.items():
        (root / str(pid)).mkdir()
        if stat is None:
            (root / str(pid) / "stat").mkdir()  # reading a directory fails, also for root
        else:
            (root / str(pid) / "stat").write_text(stat)
    monkeypatch.setattr(liveness, "PROC", root)


class TestIdentity:
    def test_a_process_and_its_observer_agree(self, here: Identity) -> None:
        code = "import os, sys; from tenure.tasks.liveness import own_identity; print(own_identity()); input()"
        with child(sys.executable, "-c", code) as process:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == str(identity_of(process.pid))

    def test_it_is_the_same_at_each_reading(self, here: Identity) -> None:
        assert own_identity() == here == identity_of(os.getpid())
        assert check(here, here) == Verdict(Life.ALIVE, "alive")

    def test_the_user_is_the_process_real_user(self, here: Identity) -> None:
        assert here.user == psutil.Process().username()

    @linux_only
    def test_the_birth_is_the_kernels_ticks(self, here: Identity) -> None:
        assert here.birth.startswith("ticks:")
        assert here.boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    def test_elsewhere_the_birth_is_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        only_psutil(monkeypatch)
        born = own_identity().birth
        assert born.startswith("time:")
        assert abs(float(born[5:]) - psutil.Process().create_time()) < 0.01

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root starts a process as another user")
    def test_a_process_of_another_user(self) -> None:
        with subprocess.Popen("cat", stdin=subprocess.PIPE, user="nobody") as process:
            assert identity_of(process.pid).user == "nobody"

    def test_a_user_without_a_name_is_a_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert liveness._user_name(3_999_999_999) == "3999999999"

    def test_no_such_process(self) -> None:
        with pytest.raises(NotFound):
            identity_of(liveness.MAX_PID)

    @linux_only
    def test_an_unreadable_process(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_proc(tmp_path / "proc", monkeypatch, {os.getpid(): None})
        with pytest.raises(Unavailable, match="unavailable"):
            own_identity()
        with pytest.raises(Unavailable):
            identity_of(os.getpid())

    @linux_only
    def test_the_wall_clock_does_not_move_it(self, here: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
        started = psutil.Process().create_time()
        boot = psutil.boot_time()
        monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot + 90)  # type: ignore[attr-defined]
        assert psutil.Process().create_time() == pytest.approx(started + 90, abs=2)
        assert own_identity() == here
        assert check(here, own_identity()).life is Life.ALIVE


class TestHost:
    def test_a_configured_host_parts_one_machine(self, here: Identity) -> None:
        one, other = own_identity("one"), own_identity(host="other")
        assert len({here.host, one.host, other.host}) == 3
        assert check(one, one).life is Life.ALIVE
        assert check(one, other) == Verdict(Life.UNKNOWN, "other_host")
        assert identity_of(os.getpid(), "one") == one

    def test_a_configured_host_cannot_pass_for_another_machine(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = own_identity("shared")
        machine = tmp_path / "machine-id"
        machine.write_text("0123456789abcdef\n")
        monkeypatch.setattr(liveness, "MACHINE_ID_FILES", (machine,))
        assert own_identity("shared").host != real.host
        assert own_identity(real.host).host != real.host

    def test_the_second_machine_id_file_serves(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        empty, full = tmp_path / "empty", tmp_path / "full"
        empty.write_text("\n")  # as container images carry it
        full.write_text("feed\n")
        monkeypatch.setattr(liveness, "MACHINE_ID_FILES", (tmp_path / "none", empty, full))
        assert liveness._machine() == f"feed {platform.node()}"

    def test_clones_that_share_a_machine_id_are_two_hosts(
        self, here: Identity, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(platform, "node", lambda: "clone-2")
        clone = replace(own_identity(), boot="another")
        assert check(clone, here) == Verdict(Life.UNKNOWN, "other_host")

    @pytest.mark.parametrize(
        ("node", "machine"),
        [
            (0x0050_5601_0203, "005056010203"),
            (0x0242_AC11_0002, "0242ac110002 box"),
            (0x0150_5601_0203, "box"),
        ],
        ids=["burnt in", "given out locally", "random"],
    )
    def test_without_a_machine_id(self, node: int, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(liveness, "MACHINE_ID_FILES", ())
        monkeypatch.setattr(uuid, "getnode", lambda: node)
        monkeypatch.setattr(platform, "node", lambda: "box")
        assert liveness._machine() == machine


class TestDead:
    def test_gone(self, cat: subprocess.Popen[str], here: Identity) -> None:
        identity = identity_of(cat.pid)
        assert check(identity, here) == Verdict(Life.ALIVE, "alive")
        cat.kill()
        cat.wait()
        assert check(identity, here) == Verdict(Life.DEAD, "no_such_process")

    @pytest.mark.parametrize("everywhere", [False, True], ids=["native", "psutil"])
    def test_a_zombie(
        self,
        cat: subprocess.Popen[str],
        everywhere: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        if everywhere:
            only_psutil(monkeypatch)
        here, identity = own_identity(), identity_of(cat.pid)
        make_zombie(cat)
        assert psutil.Process(cat.pid).is_running()  # which is why this is not asked
        assert check(identity, here) == Verdict(Life.DEAD, "zombie")

    @linux_only
    def test_a_zombie_first_thread_is_no_dead_process(self, here: Identity) -> None:
        code = (
            "import ctypes, threading\n"
            "import sys; threading.Thread(target=sys.stdin.read).start()\n"
            "print(flush=True)\n"
            "ctypes.CDLL(None).pthread_exit(None)\n"
        )
        with child(sys.executable, "-c", code) as process:
            identity = identity_of(process.pid)
            wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
            assert check(identity, here) == Verdict(Life.ALIVE, "alive")
            make_zombie(process)
            assert check(identity, here) == Verdict(Life.DEAD, "zombie")

    @linux_only
    def test_another_birth(self, here: Identity) -> None:
        ticks = int(here.birth.removeprefix("ticks:"))
        for other in (ticks - 1, ticks + 1):
            verdict = check(replace(here, birth=f"ticks:{other}"), here)
            assert verdict == Verdict(Life.DEAD, "other_birth")

    def test_another_boot(self, here: Identity) -> None:
        verdict = check(replace(here, boot="f00d"), replace(here, boot="beef"))
        assert verdict == Verdict(Life.DEAD, "other_boot")

    def test_no_boot_proves_nothing(self, here: Identity) -> None:
        nameless = replace(here, boot="")
        assert check(nameless, here).life is Life.ALIVE
        assert check(here, nameless).life is Life.ALIVE


class TestCannotTell:
    def test_another_host(self, here: Identity) -> None:
        elsewhere = replace(here, host="elsewhere", boot="f00d", pid=liveness.MAX_PID, birth="ticks:1")
        assert check(elsewhere, here) == Verdict(Life.UNKNOWN, "other_host")

    @linux_only
    def test_a_failed_read_is_not_a_zombie(
        self, cat: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        here, identity = own_identity(), identity_of(cat.pid)
        fake_proc(tmp_path / "proc", monkeypatch, {cat.pid: None})
        assert check(identity, here) == Verdict(Life.UNKNOWN, "unreadable")

    @linux_only
    @pytest.mark.parametrize("stat", ["", "1 (cat)", "1 (cat) S 1 2 3", "1 (cat) S " + "x " * 40])
    def test_a_table_in_an_unknown_format(
        self, stat: str, cat: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        here, identity = own_identity(), identity_of(cat.pid)
        fake_proc(tmp_path / "proc", monkeypatch, {cat.pid: stat})
        assert check(identity, here) == Verdict(Life.UNKNOWN, "unreadable")

    @linux_only
    def test_a_permission_denied(
        self, cat: subprocess.Popen[str], here: Identity, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        identity = identity_of(cat.pid)

        def denied(path: Path) -> bytes:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "read_bytes", denied)
        assert check(identity, here) == Verdict(Life.UNKNOWN, "unreadable")

    @linux_only
    def test_a_table_that_hides_the_processes_of_others(
        self, cat: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        here, identity = own_identity(), identity_of(cat.pid)
        fake_proc(tmp_path / "proc", monkeypatch, {})
        assert check(identity, here) == Verdict(Life.UNKNOWN, "unreadable")

        def not_permitted(pid: int, signal: int) -> None:
            raise PermissionError(1, "Operation not permitted")

        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", not_permitted)
            assert check(identity, here) == Verdict(Life.UNKNOWN, "unreadable")
        cat.kill()
        cat.wait()
        assert check(identity, here) == Verdict(Life.DEAD, "no_such_process")

    @pytest.mark.parametrize("pid", [0, -1, -os.getpid(), 2**31, 2**80])
    def test_a_number_that_is_no_pid(self, pid: int, here: Identity) -> None:
        assert check(replace(here, pid=pid), here) == Verdict(Life.UNKNOWN, "unreadable")

    @linux_only
    @pytest.mark.parametrize("birth", ["", "ticks:", "ticks:many", "time:1700000000.000", "moon:3"])
    def test_births_of_different_kinds(self, birth: str, here: Identity) -> None:
        assert check(replace(here, birth=birth), here) == Verdict(Life.UNKNOWN, "not_comparable")

    @pytest.mark.parametrize("birth", ["time:nan", "time:inf", "time:", "ticks:5"])
    def test_times_that_are_no_times(self, birth: str, monkeypatch: pytest.MonkeyPatch) -> None:
        only_psutil(monkeypatch)
        here = own_identity()
        assert check(replace(here, birth=birth), here) == Verdict(Life.UNKNOWN, "not_comparable")


class TestElsewhere:
    """Where there is no /proc, psutil is asked."""

    @pytest.fixture(autouse=True)
    def _no_proc(self, monkeypatch: pytest.MonkeyPatch) -> None:
        only_psutil(monkeypatch)

    @pytest.mark.parametrize(
        ("moved", "verdict"),
        [
            (1, Verdict(Life.ALIVE, "alive")),
            (-1, Verdict(Life.ALIVE, "alive")),
            (3, Verdict(Life.DEAD, "other_birth")),
            (-3, Verdict(Life.DEAD, "other_birth")),
        ],
    )
    def test_a_creation_time_moves_with_the_clock(
        self, moved: int, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        here, real = own_identity(), psutil.Process.create_time
        monkeypatch.setattr(psutil.Process, "create_time", lambda self: real(self) + moved)
        assert check(here, here) == verdict

    @pytest.mark.parametrize(
        ("error", "verdict"),
        [
            (psutil.AccessDenied(1), Verdict(Life.UNKNOWN, "unreadable")),
            (psutil.TimeoutExpired(1), Verdict(Life.UNKNOWN, "unreadable")),
            (OSError(5, "Input/output error"), Verdict(Life.UNKNOWN, "unreadable")),
            (psutil.ZombieProcess(1), Verdict(Life.DEAD, "zombie")),
            (psutil.NoSuchProcess(1), Verdict(Life.DEAD, "no_such_process")),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
    )
    def test_each_error_of_psutil(self, error: Exception, verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
        here = own_identity()

        def fail(process: psutil.Process) -> str:
            raise error

        monkeypatch.setattr(psutil.Process, "status", fail)
        assert check(here, here) == verdict


@linux_only
class TestOddNames:
    @pytest.mark.parametrize("name", ["a b", "a) R 1 (b", ") Z 9 9", "x)"])
    def test_a_name_with_spaces_and_parentheses(self, name: str, tmp_path: Path, here: Identity) -> None:
        program = shutil.which("cat")
        assert program is not None
        shutil.copy(program, tmp_path / name)
        with child(name, program=str(tmp_path / name)) as process:
            assert f"({name})" in Path(f"/proc/{process.pid}/stat").read_text()
            identity = identity_of(process.pid)
            age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(identity.birth[6:]) / os.sysconf("SC_CLK_TCK")
            assert 0 <= age < 60
            assert check(identity, here) == Verdict(Life.ALIVE, "alive")


class TestAdmit:
    def test_a_live_process(self, cat: subprocess.Popen[str], here: Identity) -> None:
        admission = admit(identity_of(cat.pid), here, owner_pid=OWNER)
        assert admission == Admission(admitted=True, life=Life.ALIVE, reason="alive")

    def test_a_dead_one(self, cat: subprocess.Popen[str], here: Identity) -> None:
        identity = identity_of(cat.pid)
        make_zombie(cat)
        admission = admit(identity, here, owner_pid=OWNER)
        assert admission == Admission(admitted=False, life=Life.DEAD, reason="zombie")
        cat.wait()
        assert admit(identity, here, owner_pid=OWNER).reason == "no_such_process"

    def test_another_birth(self, here: Identity) -> None:
        admission = admit(replace(here, boot="", birth="ticks:1"), here, owner_pid=OWNER)
        assert admission == Admission(admitted=False, life=Life.DEAD, reason="other_birth")

    def test_the_owner_itself(self, here: Identity) -> None:
        admission = admit(here, here, owner_pid=here.pid)
        assert admission == Admission(admitted=False, life=Life.ALIVE, reason="is_owner")
        untold = admit(replace(here, birth="moon:1"), here, owner_pid=here.pid)
        assert untold == Admission(admitted=False, life=Life.UNKNOWN, reason="is_owner")

    def test_the_owners_number_on_another_host(self, here: Identity) -> None:
        elsewhere = replace(here, host="elsewhere")
        admission = admit(elsewhere, here, owner_pid=here.pid)
        assert admission == Admission(admitted=True, life=Life.UNKNOWN, reason="other_host")

    def test_another_user(self, cat: subprocess.Popen[str], here: Identity) -> None:
        claimed = replace(identity_of(cat.pid), user="somebody")
        admission = admit(claimed, here, owner_pid=OWNER)
        assert admission == Admission(admitted=False, life=Life.ALIVE, reason="other_user")
        assert check(claimed, here).life is Life.ALIVE  # it may have changed its user since; it is not dead

    def test_a_user_that_cannot_be_read(
        self, cat: subprocess.Popen[str], here: Identity, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        identity = identity_of(cat.pid)

        def denied(process: psutil.Process) -> str:
            raise psutil.AccessDenied(process.pid)

        monkeypatch.setattr(psutil.Process, "username", denied)
        assert admit(identity, here, owner_pid=OWNER).admitted

    @linux_only
    def test_cannot_tell(self, cat: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        here, identity = own_identity(), identity_of(cat.pid)
        fake_proc(tmp_path / "proc", monkeypatch, {cat.pid: None})
        admission = admit(identity, here, owner_pid=OWNER)
        assert admission == Admission(admitted=True, life=Life.UNKNOWN, reason="unreadable")


def unshare(*options: str) -> tuple[str, ...]:
    """Return the command before a command in new namespaces; skips where this may not be done."""
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("needs root and unshare")
    if subprocess.run(["unshare", *options, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip(f"unshare {' '.join(options)} is not allowed here")
    return ("unshare", *options)


def in_namespace(*options: str, code: str) -> str:
    command = [*unshare(*options), sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@linux_only
class TestNamespaces:
    def test_equal_pids_of_two_containers_are_two_hosts(self, here: Identity) -> None:
        code = (
            "import sys; from tenure.tasks.liveness import own_identity;"
            "x = own_identity(); print(x.host, x.pid, flush=True); sys.stdin.read()"
        )
        container = (*unshare("-p", "-f", "--mount-proc", "--kill-child"), sys.executable, "-c", code)
        with child(*container) as one, child(*container) as two:
            assert one.stdout is not None
            assert two.stdout is not None
            first, second = one.stdout.readline().split(), two.stdout.readline().split()
        assert first[1] == second[1] == "1"
        assert len({here.host, first[0], second[0]}) == 3

    def test_a_table_of_another_namespace_tells_nothing(self, here: Identity) -> None:
        code = (
            "import os; from dataclasses import replace; from tenure.tasks.liveness import *;"
            "x = own_identity(); print(x.birth[6:], x.pid, check(x, x).reason, check(replace(x, pid=99), x).reason)"
        )
        ticks, found = in_namespace("-p", "-f", code=code).split(maxsplit=1)
        assert found == "1 unreadable unreadable"
        assert int(ticks) >= int(here.birth[6:])  # its own birth, not that of the first process of ours

    def test_another_time_namespace_is_another_host(self, here: Identity) -> None:
        code = "from tenure.tasks.liveness import own_identity; print(own_identity().host)"
        assert in_namespace("-T", "--boottime", "1000", code=code) != here.host

    def test_a_pid_reused_within_one_tick_is_told_apart_by_the_secret_alone(self) -> None:
        code = (
            "import os, signal\n"
            "from tenure.tasks.liveness import identity_of\n"
            "def start():\n"
            "    open('/proc/sys/kernel/ns_last_pid', 'w').write('499')\n"
            "    if (pid := os.fork()) == 0:\n"
            "        signal.pause()\n"
            "    return pid\n"
            "for _ in range(200):\n"
            "    found = []\n"
            "    for _ in range(2):\n"
            "        pid = start()\n"
            "        found.append(identity_of(pid))\n"
            "        os.kill(pid, signal.SIGKILL)\n"
            "        os.waitpid(pid, 0)\n"
            "    if found[0] == found[1]:\n"
            "        break\n"
            "print(found[0] == found[1])\n"
        )
        assert in_namespace("-p", "-f", "--mount-proc", code=code) == "True"
        identity = Identity(host="h", boot="b", pid=500, birth="ticks:1", user="u")
        facts = {"profile": "p", "session_id": "s", "execution_id": "e", "generation": 1, "principal": "w"}
        claims = {
            claim_digest(identity=identity, secret_digest=secret_digest(secret), **facts)  # type: ignore[arg-type]
            for secret in ("one secret of mine", "another secret")
        }
        assert len(claims) == 2
