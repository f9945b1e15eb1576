"""Where an embedded broker listens: a socket in a folder of ours, or a port of the loopback interface."""

from __future__ import annotations

import os
import socket
import stat
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ..ledger.errors import ConfigurationError, Unavailable
from .private_files import require_private

SOCKET_PATH_LIMIT = 108 if sys.platform == "linux" else 104  # bytes, the closing NUL included
CALL_SECONDS = 2.0  # for a server to answer one call


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens: a unix socket's path or, where that is empty, a port of the loopback interface."""

    path: str = ""
    port: int = 0

    @property
    def url(self) -> str:
        """The address as Celery takes it."""
        return f"redis+socket://{quote(self.path)}" if self.path else f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        """Return a client that answers or fails within `CALL_SECONDS` and tries nothing twice."""
        return redis.Redis(
            host="127.0.0.1",
            port=self.port,
            unix_socket_path=self.path or None,
            socket_timeout=CALL_SECONDS,
            socket_connect_timeout=CALL_SECONDS,
            retry=Retry(NoBackoff(), 0),
            decode_responses=True,
        )

    def answers(self) -> bool:
        """Whether a server serves here; one that still loads its data does not."""
        with self.client() as client:
            try:
                return bool(client.ping())
            except (redis.ConnectionError, redis.TimeoutError):
                return False

    def listens(self) -> bool:
        """Whether anything takes connections here."""
        with socket.socket(socket.AF_UNIX if self.path else socket.AF_INET) as probe:
            probe.settimeout(CALL_SECONDS)
            try:
                probe.connect(self.path or ("127.0.0.1", self.port))
            except (ConnectionRefusedError, FileNotFoundError):
                return False
            except (TimeoutError, BlockingIOError):
                return True  # it is there, and too busy to take us
            return True


def socket_path(folder: Path, previous: str) -> Path:
    """Return the path of the socket, in a short folder of ours where the state directory's name is too long.

    That folder is kept, and used again when `previous` lies in it, so that clients find a restarted server
    where it was. Raises `ConfigurationError` when the system's temporary folder has too long a name itself.
    """
    path = folder / "broker.sock"
    if _fits(path):
        return path
    if previous and _is_private(Path(previous).parent):
        return Path(previous)
    short = Path(tempfile.mkdtemp(prefix="tenure-"))
    if _fits(short / path.name):
        return short / path.name
    short.rmdir()
    raise ConfigurationError(f"neither {path} nor {short / path.name} is short enough for a socket")


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) < SOCKET_PATH_LIMIT


def _is_private(folder: Path) -> bool:
    try:
        require_private(folder.lstat(), folder)
    except (FileNotFoundError, ConfigurationError):
        return False
    return True


def clear_socket(address: Address) -> None:
    """Remove a socket that a killed server left; raises when anything else is in the way."""
    path = Path(address.path)
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise ConfigurationError(f"{path} is in the way of the broker's socket")
    if address.listens():
        raise Unavailable(f"another server listens at {path}")
    path.unlink()
