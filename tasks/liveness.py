"""Who a process is, and whether it still lives: alive, dead, or cannot tell.

Dead is only ever said with proof. Another machine, a process table that cannot be read, facts that cannot
be compared: all of these are *cannot tell*, because declaring a live worker dead starts its work twice.
None of it decides who may write; that is the secret's business.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import sys
import uuid
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from ..ledger.claims import Identity
from ..ledger.errors import NotFound, Unavailable

if sys.platform != "win32":
    import pwd

LINUX = sys.platform == "linux"
PROC = Path("/proc")
MACHINE_ID_FILES = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
BIRTH_TOLERANCE = 2.0  # seconds by which two readings of one creation time may differ
MAX_PID = 2**31 - 1  # what a pid_t holds


class Life(StrEnum):
    """What is known of a process."""

    ALIVE = "alive"
    DEAD = "dead"  # proven
    UNKNOWN = "unknown"  # cannot tell; never to be treated as dead


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of a process, and the stable token that says why."""

    life: Life
    reason: str


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether a process may register; a refusal's reason is a verdict's, `is_owner` or `other_user`."""

    admitted: bool
    life: Life
    reason: str


_ALIVE = Verdict(Life.ALIVE, "alive")
_OTHER_HOST = Verdict(Life.UNKNOWN, "other_host")
_UNREADABLE = Verdict(Life.UNKNOWN, "unreadable")
_NOT_COMPARABLE = Verdict(Life.UNKNOWN, "not_comparable")
_OTHER_BOOT = Verdict(Life.DEAD, "other_boot")
_NO_SUCH_PROCESS = Verdict(Life.DEAD, "no_such_process")
_OTHER_BIRTH = Verdict(Life.DEAD, "other_birth")
_ZOMBIE = Verdict(Life.DEAD, "zombie")


@dataclass(frozen=True, slots=True)
class _Process:
    birth: str
    zombie: bool


class _AbsentError(Exception):
    """No process has this pid."""


class _UnreadableError(Exception):
    """The process table did not answer, or not about our processes."""


def own_identity(host: str | None = None) -> Identity:
    """Return the facts of the calling process.

    `host` parts one machine into several hosts. It is mixed into the machine's own facts and never replaces
    them, so a configuration can make processes strangers to each other but cannot pass off one machine as
    another. Raises `Unavailable` when the process table cannot be read.
    """
    try:
        if LINUX:
            # Through `self`, which finds us even where /proc shows another pid namespace than ours.
            birth = _parse_stat((PROC / "self/stat").read_bytes()).birth
            user = _user_name(os.getuid())
        else:
            birth, user = _read_psutil(os.getpid()).birth, psutil.Process().username()
    except (_AbsentError, _UnreadableError, psutil.Error, OSError) as error:
        raise Unavailable(f"own process cannot be read: {error}") from error
    return Identity(host=_host(host), boot=_boot(), pid=os.getpid(), birth=birth, user=user)


def identity_of(pid: int, host: str | None = None) -> Identity:
    """Return the facts of a process on this machine; `host` as in `own_identity`.

    Raises `NotFound` when there is no such process, `Unavailable` when it cannot be read.
    """
    try:
        birth, user = _read(pid).birth, _user_of(pid)
    except _AbsentError as error:
        raise NotFound(f"process {pid}") from error
    except _UnreadableError as error:
        raise Unavailable(f"process {pid} cannot be read: {error}") from error
    return Identity(host=_host(host), boot=_boot(), pid=pid, birth=birth, user=user)


def check(identity: Identity, here: Identity) -> Verdict:
    """Say whether the process of `identity` lives, as seen from the calling process, whose own is `here`."""
    if identity.host != here.host:
        return _OTHER_HOST
    if identity.boot and here.boot and identity.boot != here.boot:
        return _OTHER_BOOT
    try:
        found = _read(identity.pid)
    except _AbsentError:
        return _NO_SUCH_PROCESS
    except _UnreadableError:
        return _UNREADABLE
    return _ZOMBIE if found.zombie else _compare(identity.birth, found.birth)


def admit(identity: Identity, here: Identity, *, owner_pid: int) -> Admission:
    """Say whether the process of `identity` may register with the owner, whose process is `owner_pid`.

    What is proven dead, the owner itself and a process of another user than claimed are refused; what cannot
    be told is admitted.
    """
    verdict = check(identity, here)
    refusal: str | None = None
    if verdict.life is Life.DEAD:
        refusal = verdict.reason
    elif identity.host == here.host and identity.pid == owner_pid:
        refusal = "is_owner"
    elif verdict.life is Life.ALIVE and _is_other_user(identity):
        refusal = "other_user"
    return Admission(refusal is None, verdict.life, refusal or verdict.reason)


def _is_other_user(identity: Identity) -> bool:
    try:
        return _user_of(identity.pid) != identity.user
    except (_AbsentError, _UnreadableError):
        return False  # it ended since, or cannot be read: not proven another's


def _compare(claimed: str, found: str) -> Verdict:
    kind, _, claimed_value = claimed.partition(":")
    found_kind, _, found_value = found.partition(":")
    if kind != found_kind:
        return _NOT_COMPARABLE
    try:
        same = _same_birth(kind, claimed_value, found_value)
    except ValueError:
        return _NOT_COMPARABLE
    return _ALIVE if same else _OTHER_BIRTH


def _same_birth(kind: str, one: str, other: str) -> bool:
    if kind == "ticks":
        return int(one) == int(other)
    distance = abs(float(one) - float(other))
    if kind != "time" or not math.isfinite(distance):
        raise ValueError(kind)
    return distance <= BIRTH_TOLERANCE


def _read(pid: int) -> _Process:
    if not 0 < pid <= MAX_PID:  # zero and negative numbers name process groups
        raise _UnreadableError("not a pid")
    return _read_proc(pid) if LINUX else _read_psutil(pid)


def _read_proc(pid: int) -> _Process:
    try:
        # A /proc left over from another pid namespace tells about other processes under our numbers.
        if (PROC / "self").readlink() != Path(str(os.getpid())):
            raise _UnreadableError("/proc shows another pid namespace")
        return _parse_stat((PROC / str(pid) / "stat").read_bytes())
    except (FileNotFoundError, ProcessLookupError) as error:
        # /proc may be mounted so that it hides the processes of others: the kernel's word is the proof.
        if _kernel_denies(pid):
            raise _AbsentError(str(error)) from error
        raise _UnreadableError(str(error)) from error
    except OSError as error:
        raise _UnreadableError(str(error)) from error


def _kernel_denies(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)  # not permitted means that there is one
    return False


def _parse_stat(stat: bytes) -> _Process:
    # The command's name stands in parentheses and may hold spaces and parentheses itself.
    fields = stat.rpartition(b")")[2].split()
    try:
        state, threads, ticks = fields[0], int(fields[17]), int(fields[19])
    except (IndexError, ValueError) as error:
        raise _UnreadableError("stat has an unknown format") from error
    # A process whose first thread has ended shows as a zombie while its other threads run on.
    return _Process(birth=f"ticks:{ticks}", zombie=state in (b"Z", b"X") and threads <= 1)


def _read_psutil(pid: int) -> _Process:
    try:
        process = psutil.Process(pid)
        zombie = process.status() == psutil.STATUS_ZOMBIE
        return _Process(birth=f"time:{process.create_time():.3f}", zombie=zombie)
    except psutil.ZombieProcess:  # a kind of NoSuchProcess
        return _Process(birth="", zombie=True)
    except psutil.NoSuchProcess as error:
        raise _AbsentError(str(error)) from error
    except (psutil.Error, OSError) as error:
        raise _UnreadableError(str(error)) from error


def _user_of(pid: int) -> str:
    try:
        return psutil.Process(pid).username()
    except psutil.NoSuchProcess as error:
        raise _AbsentError(str(error)) from error
    except (psutil.Error, OSError) as error:
        raise _UnreadableError(str(error)) from error


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _boot() -> str:
    return _read_line(PROC / "sys/kernel/random/boot_id")


def _host(part: str | None) -> str:
    # The time namespace stands beside the pid namespace because start ticks are counted in the reader's.
    facts = [_machine(), _namespace("pid"), _namespace("time"), part or ""]
    return hashlib.sha256("\0".join(["tenure.host", *facts]).encode()).hexdigest()[:16]


def _machine() -> str:
    for path in MACHINE_ID_FILES:
        if machine_id := _read_line(path):
            # Clones and container images share a machine id; taken alone, their boots would prove deaths.
            return f"{machine_id} {platform.node()}"
    node = uuid.getnode()
    if node >> 40 & 0b01:  # random, so another one in every process
        return platform.node()
    # A burnt-in address is unique; one that was given out locally (bit 41) repeats from host to host.
    return f"{node:012x} {platform.node()}" if node >> 40 & 0b10 else f"{node:012x}"


def _namespace(kind: str) -> str:
    try:
        return str((PROC / "self/ns" / kind).readlink())
    except OSError:
        return ""


def _read_line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
