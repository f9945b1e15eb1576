"""Files and folders that belong to one user alone, and the disk's refusals in tenure's words."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..ledger.errors import ConfigurationError, Unavailable

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_ANY_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LINK_ERRNOS = {errno.ELOOP, errno.EMLINK, errno.ENOTDIR}  # what O_NOFOLLOW answers on the various systems


@contextmanager
def disk_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn the system's errors into one clear line that names the path.

    Raises:
        ConfigurationError: a symbolic link was refused, or a file stands where a folder must.
        Unavailable: anything else, as a full or a read-only disk.
    """
    try:
        yield
    except OSError as error:
        data = {"path": str(path), "errno": error.errno}
        if error.errno in _LINK_ERRNOS:
            raise ConfigurationError(f"{path}: a symbolic link or a file stands where none may", data) from error
        raise Unavailable(f"cannot {doing} {path}: {error.strerror or error}", data) from error


def open_private_folder(path: Path) -> int:
    """Open a folder that is ours alone (created 0700 when missing) and return its descriptor.

    Neither it nor the folder above it may be a symbolic link or another user's, and nobody else may write to
    the one above, or the folder could be exchanged.

    Raises:
        ConfigurationError: one of them is not so.
        Unavailable: the disk refuses.
    """
    with ExitStack() as undo, disk_errors("open", path):
        _make(path.parent)
        above = os.open(path.parent, _FOLDER_FLAGS)
        undo.callback(os.close, above)
        require_private(os.fstat(above), path.parent, _OTHERS_WRITE)
        with suppress(FileExistsError):
            os.mkdir(path.name, 0o700, dir_fd=above)
        os.fsync(above)
        folder = os.open(path.name, _FOLDER_FLAGS, dir_fd=above)
        undo.push(lambda error, *_: os.close(folder) if error else None)
        require_private(os.fstat(folder), path)
    return folder


def _make(path: Path) -> None:
    """Create a folder and those above it, each durably in the one that holds it."""
    if path.exists():
        return
    _make(path.parent)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    above = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(above)
    finally:
        os.close(above)


def require_private(status: os.stat_result, path: Path, forbidden: int = _ANY_OTHERS) -> None:
    """Judge a file or folder by its status; `forbidden` are the mode bits that others may not have.

    Raises:
        ConfigurationError: it is of another kind, another user's, or open to others.
    """
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise ConfigurationError(f"{path} is neither a regular file nor a folder")
    if status.st_uid != os.geteuid():
        raise ConfigurationError(f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}")
    if excess := stat.S_IMODE(status.st_mode) & forbidden:
        raise ConfigurationError(f"{path} gives others access ({excess:03o}): run chmod go-rwx on it")
