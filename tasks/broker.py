"""The embedded broker: a server of our own for one machine, kept by one supervisor for each state directory.

A supervisor holds the lock of `DIR/broker`, starts the server and ends it; one that is killed takes its server
along. Everything lies in that folder, which is the user's alone: the lock, the server's data and log, its
socket, and the record by which clients and the next supervisor find the server.
"""

from __future__ import annotations

import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import filelock
import msgspec
import psutil

from ..ledger.claims import Identity
from ..ledger.errors import ConfigurationError, Unavailable
from .broker_address import Address, clear_socket, socket_path
from .broker_server import Server, fakeredis_command, find_server, server_command, verify
from .liveness import Life, check, identity_of, own_identity
from .private_files import open_private_folder

if TYPE_CHECKING:
    from types import TracebackType

LOG_LINES = 15  # of the server's log, quoted in an error
PAUSE = 0.02  # seconds between two looks at a server that starts or ends


@dataclass(frozen=True, slots=True)
class _Record:
    """The server that was started last, and for which folder: a record may have been copied along with it."""

    folder: str
    address: Address
    identity: Identity


def embedded_url(state_dir: Path) -> str | None:
    """Return the URL of the embedded broker that runs for this state directory, or None.

    Raises `ConfigurationError` when its folder is not the user's alone or holds no record of ours, `Unavailable`
    when the disk refuses.
    """
    folder = _folder_of(state_dir)
    if not os.path.lexists(folder):
        return None
    _open(folder)
    record = _read_record(folder)
    if record is None or check(record.identity, own_identity()).life is Life.DEAD:
        return None
    return record.address.url if record.address.listens() else None


class EmbeddedBroker:
    """The supervisor of a state directory's broker, as a context manager or by `start` and `stop`."""

    def __init__(self, state_dir: Path, *, start_seconds: float = 30.0, stop_seconds: float = 10.0) -> None:
        """`start_seconds` is what a start may take, `stop_seconds` what a server has before it is killed."""
        self._folder = _folder_of(state_dir)
        self._start_seconds = start_seconds
        self._stop_seconds = stop_seconds
        self._lock = filelock.FileLock(self._folder / "lock", timeout=0, mode=0o600, thread_local=False)
        self._server: Server | None = None
        self._record: _Record | None = None
        self._process: subprocess.Popen[bytes] | None = None
        # The kernel ends the server when the thread that forked it ends, so one thread is kept for forking.
        self._forker: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The broker's URL as Celery takes it; raises `Unavailable` when not started."""
        return self._started().address.url

    @property
    def pid(self) -> int:
        """The server's process; raises `Unavailable` when not started."""
        return self._started().identity.pid

    @property
    def description(self) -> str:
        """One line for people: which server it is."""
        return self._server.description if self._server else "embedded broker, not started"

    @property
    def running(self) -> bool:
        """Whether the server's process lives; if it has died, `start` starts it again on the same data."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server and wait until it serves; does nothing while it runs.

        Raises `ConfigurationError` when the folder cannot be used, `Unavailable` when another supervisor has
        it, or the server does not come up in time (with the end of its log).
        """
        if self.running:
            return
        _open(self._folder)
        with ExitStack() as undo:
            self._take_lock()
            undo.callback(self.stop)
            self._end_server()
            previous = _read_record(self._folder)
            if previous:
                _end_orphan(previous.identity, self._stop_seconds)
            self._launch(previous.address if previous else Address())
            undo.pop_all()

    def stop(self) -> None:
        """End the server, which first writes its data out, and free the folder; may be called again."""
        self._end_server()
        self._record = None
        self._lock.release()

    def _started(self) -> _Record:
        if self._record is None:
            raise Unavailable("the embedded broker is not started")
        return self._record

    def _take_lock(self) -> None:
        if self._lock.is_locked:  # the server died and is started again
            return
        try:
            self._lock.acquire()
        except filelock.Timeout as error:
            raise Unavailable(f"another supervisor runs the embedded broker in {self._folder}") from error

    def _end_server(self) -> None:
        if self._process is not None:
            with self._process as process:
                process.terminate()
                if _exit_status(process, self._stop_seconds) is None:
                    process.kill()
        if self._forker is not None:
            self._forker.shutdown()
        self._process = self._forker = None

    def _launch(self, previous: Address) -> None:
        deadline = time.monotonic() + self._start_seconds
        self._server = find_server()
        if self._server.program is None:
            process, address = self._launch_fakeredis(previous.port, deadline)
        else:
            process, address = self._launch_program(self._server.program, previous.path)
        self._record = _Record(str(self._folder), address, identity_of(process.pid))
        _write_record(self._folder, self._record)
        self._wait_until_ready(process, address, deadline)
        if self._server.program is not None:
            verify(address, process.pid)

    def _launch_program(self, program: str, previous: str) -> tuple[subprocess.Popen[bytes], Address]:
        address = Address(path=str(socket_path(self._folder, previous)))
        clear_socket(address)
        return self._fork(server_command(program, self._folder, address)), address

    def _launch_fakeredis(self, port: int, deadline: float) -> tuple[subprocess.Popen[bytes], Address]:
        process = self._fork(fakeredis_command(port), talk=True)
        assert process.stdout is not None
        assert self._forker is not None
        line = self._forker.submit(process.stdout.readline)
        try:
            return process, Address(port=int(line.result(deadline - time.monotonic())))
        except (TimeoutError, ValueError) as error:
            raise self._failure("did not come up") from error

    def _fork(self, command: list[str], *, talk: bool = False) -> subprocess.Popen[bytes]:
        self._forker = ThreadPoolExecutor(1, "tenure-broker")
        with _fresh_log(self._folder).open("wb") as log:
            # S603: the command is ours, its program chosen by `find_server`.
            self._process = self._forker.submit(
                lambda: subprocess.Popen(  # noqa: S603
                    command,
                    stdin=subprocess.PIPE if talk else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if talk else log,
                    stderr=log,
                    start_new_session=True,  # an interrupt at the terminal is the supervisor's to answer
                    umask=0o077,
                )
            ).result()
        return self._process

    def _wait_until_ready(self, process: subprocess.Popen[bytes], address: Address, deadline: float) -> None:
        while not address.answers():
            status = _exit_status(process, PAUSE)
            if status is not None:
                raise self._failure(f"ended at its start with status {status}")
            if time.monotonic() > deadline:
                raise self._failure(f"did not answer within {self._start_seconds:g} s")

    def _failure(self, what: str) -> Unavailable:
        lines = (self._folder / "server.log").read_text(errors="replace").splitlines()
        return Unavailable("\n".join([f"{self.description} {what}", *lines[-LOG_LINES:]]))


def _folder_of(state_dir: Path) -> Path:
    return state_dir.resolve() / "broker"


def _open(folder: Path) -> None:
    os.close(open_private_folder(folder))


def _exit_status(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _fresh_log(folder: Path) -> Path:
    log = folder / "server.log"
    if log.exists():
        log.replace(folder / "server.log.1")
    return log


def _end_orphan(identity: Identity, seconds: float) -> None:
    """End a server that outlived its supervisor: two servers on one folder would ruin its data."""
    try:
        process = psutil.Process(identity.pid)
        for end in (process.terminate, process.kill):
            if _lives(identity):
                end()  # psutil makes sure that it is still the process that was there above
                _wait_while_alive(identity, seconds)
    except psutil.NoSuchProcess:
        return
    if _lives(identity):
        raise Unavailable(f"process {identity.pid}, a server that an earlier supervisor left, does not end")


def _lives(identity: Identity) -> bool:
    return check(identity, own_identity()).life is Life.ALIVE


def _wait_while_alive(identity: Identity, seconds: float) -> None:
    # Not psutil's wait, which takes a server that nobody has reaped yet for one that lives.
    deadline = time.monotonic() + seconds
    while _lives(identity) and time.monotonic() < deadline:
        time.sleep(PAUSE)


def _read_record(folder: Path) -> _Record | None:
    path = folder / "server.json"
    try:
        record = msgspec.json.decode(path.read_bytes(), type=_Record)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{path} is not a broker's record ({error}); remove it") from error
    return record if record.folder == str(folder) else None


def _write_record(folder: Path, record: _Record) -> None:
    fresh = folder / "server.json.new"
    fresh.write_bytes(msgspec.json.encode(record))
    fresh.replace(folder / "server.json")
