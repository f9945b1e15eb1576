"""The file under an outbox: private to one user, opened by one process, appended durably.

It lies in a folder `outbox` (0700) beside its lock. No symbolic link is followed in the folder, in the folder above
it or to a file. A write that fails is taken back; where even that cannot be had, the file refuses everything
until it is opened again.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from ..ledger.errors import TenureError, Unavailable
from .private_files import disk_errors, open_private_folder, require_private

FOLDER = "outbox"
_FILE_FLAGS = os.O_RDWR | os.O_NOFOLLOW
_CHUNK = 2**20


class JournalFile:
    """One locked log file, `NAME.log`, which may not exist yet.

    `stale` is true while the disk may not hold what was written: `replace` must run before the next append.
    """

    def __init__(self, folder: int, path: Path, lock: FileLock) -> None:
        self.path = path
        self.length = 0
        self.stale = False
        self._folder = folder
        self._lock = lock
        self._fd: int | None = None
        self._broken = ""
        self._temporary = f"{path.stem}.tmp"

    @classmethod
    def open(cls, directory: Path, name: str) -> Self:
        """Lock and open `DIRECTORY/outbox/NAME.log`; the folders are created when missing.

        Raises:
            ConfigurationError: a symbolic link, another user's file, or access for others.
            Unavailable: it is open already, or the disk does not let us.
        """
        path = directory.absolute() / FOLDER / f"{name}.log"
        with ExitStack() as undo:
            folder = open_private_folder(path.parent)
            undo.callback(os.close, folder)
            lock = _acquire(path.with_name(f"{name}.lock"), folder)
            file = cls(folder, path, lock)
            undo.pop_all()
            undo.callback(file.close)
            file._open_log()
            undo.pop_all()
        return file

    @property
    def exists(self) -> bool:
        """Whether there is a log; `replace` makes one."""
        return self._fd is not None

    def read(self) -> bytes:
        """Return all bytes of the log.

        Raises:
            Unavailable: it cannot be read.
        """
        chunks, offset = [], 0
        with disk_errors("read", self.path):
            while chunk := os.pread(self._log, _CHUNK, offset):
                chunks.append(chunk)
                offset += len(chunk)
        return b"".join(chunks)

    def keep(self, length: int) -> None:
        """Cut the log to `length` bytes, make them and its name durable whoever wrote them, remove left-overs.

        Raises:
            Unavailable: the disk refuses.
        """
        with disk_errors("write", self.path):
            if os.fstat(self._log).st_size > length:
                os.ftruncate(self._log, length)
            _sync(self._log)
            self._discard_temporary()
            os.fsync(self._folder)
        self.length = length

    def append(self, data: bytes, *, durable: bool) -> None:
        """Write `data` at the end; on return it survives this process or, if `durable`, the machine.

        Raises:
            Unavailable: the disk refuses; nothing of `data` is left in the file.
        """
        self._refuse_broken()
        with disk_errors("write", self.path):
            try:
                self._refuse_removed()
                _write(self._log, data, self.length)
                if durable:
                    self._sync_log()
            except OSError:
                self._retreat()
                raise
        self.length += len(data)

    def replace(self, data: bytes, fault: Callable[[str], None]) -> None:
        """Put a new log with these bytes in the place of the old one: after a crash it is either.

        Raises:
            Unavailable: the disk refuses; the old log stands, or the file is stale.
        """
        self._refuse_broken()
        with disk_errors("write", self.path):
            fd = self._write_temporary(data, fault)
            old, self._fd, self.length, self.stale = self._fd, fd, len(data), True
            if old is not None:
                os.close(old)
            fault("after_rename")
            os.fsync(self._folder)
        self.stale = False

    def reopen(self) -> None:
        """Open again, under the lock, what now has the log's name: an interrupted `replace` may have changed it.

        Raises:
            ConfigurationError, Unavailable: as `open`.
        """
        old, self._fd = self._fd, None
        if old is not None:
            os.close(old)
        self._open_log()
        if self._fd is None:
            raise Unavailable(f"{self.path} was removed while open", {"path": str(self.path)})

    def unlink(self) -> None:
        """Remove log and lock, and close.

        Raises:
            Unavailable: the disk refuses; it is closed all the same.
        """
        with ExitStack() as at_last, disk_errors("remove", self.path):
            at_last.callback(self.close)
            os.unlink(self.path.name, dir_fd=self._folder)
            # Under the lock: who has opened this lock file and waits finds it without a name, and gives up.
            os.unlink(Path(self._lock.lock_file).name, dir_fd=self._folder)
            os.fsync(self._folder)

    def close(self) -> None:
        """Close and unlock. In a forked child this ends the child's copies only; the lock stays the parent's."""
        with ExitStack() as last_first:
            last_first.callback(self._lock.release)
            last_first.callback(os.close, self._folder)
            if self._fd is not None:
                last_first.callback(os.close, self._fd)

    @property
    def _log(self) -> int:
        assert self._fd is not None, "replace() has not made the log yet"
        return self._fd

    def _open_log(self) -> None:
        with disk_errors("open", self.path), suppress(FileNotFoundError):
            self._fd = os.open(self.path.name, _FILE_FLAGS, dir_fd=self._folder)
            require_private(os.fstat(self._fd), self.path)

    def _refuse_broken(self) -> None:
        if self._broken:
            raise Unavailable(self._broken, {"path": str(self.path)})

    def _refuse_removed(self) -> None:
        if os.fstat(self._log).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "it was removed while open")

    def _sync_log(self) -> None:
        try:
            _sync(self._log)
        except OSError:
            # The kernel may have dropped the pages and report it only once, so another sync proves nothing.
            self.stale = True
            raise

    def _retreat(self) -> None:
        try:
            os.ftruncate(self._log, self.length)
        except OSError as error:
            self._broken = f"{self.path} holds half a record that cannot be cut off: {error.strerror}; reopen it"

    def _write_temporary(self, data: bytes, fault: Callable[[str], None]) -> int:
        self._discard_temporary()
        flags = _FILE_FLAGS | os.O_CREAT | os.O_EXCL
        fd = os.open(self._temporary, flags, 0o600, dir_fd=self._folder)
        try:
            _write(fd, data, 0)
            os.fsync(fd)
            fault("before_rename")
            os.rename(self._temporary, self.path.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except BaseException:
            os.close(fd)
            self._discard_temporary()  # a full disk needs the room
            raise
        return fd

    def _discard_temporary(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._temporary, dir_fd=self._folder)


def _acquire(path: Path, folder: int) -> FileLock:
    # A lock without flock would be a file that outlives a crash; and the hold is the outbox', not a thread's.
    lock = FileLock(path, mode=0o600, blocking=False, thread_local=False, fallback_to_soft=False)
    with disk_errors("lock", path):
        try:
            lock.acquire()
        except Timeout:
            raise Unavailable(
                f"{path} is locked: the outbox is open already, in this or another process",
                {"path": str(path)},
            ) from None
        try:
            require_private(os.stat(path.name, dir_fd=folder, follow_symlinks=False), path)
        except (OSError, TenureError):
            lock.release()
            raise
    return lock


def _write(fd: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written


def _sync(fd: int) -> None:
    getattr(os, "fdatasync", os.fsync)(fd)  # macOS has no fdatasync
