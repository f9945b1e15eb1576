"""What passes through broker, logs and Flower can be read by others: names and sizes are there, secrets are not."""

from __future__ import annotations

import base64
import json
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import redis

from tenure.ledger import secret_digest
from tenure.workflows import Execution
from tests.services import redis_client, wait_until
from tests.tasks.live import PREFIX, Fleet, says, submit

PAYLOAD = "only-the-ledger-may-tell-this"
SECRET = "a-secret-of-the-root-0123456789"
CHILD_SECRET = "a-secret-of-the-child-0123456789"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Flower:
    """A Flower whose API anybody on this machine may ask."""

    def __init__(self, fleet: Fleet) -> None:
        port = free_port()
        self._url = f"http://127.0.0.1:{port}/api/"
        options = ("--address=127.0.0.1", f"--port={port}", "--persistent=False")
        self.process = fleet.celery("flower", *options, env={"FLOWER_UNAUTHENTICATED_API": "true"})
        wait_until(lambda: self.get("workers?refresh=1"), within=40, what="Flower shows a worker")

    def get(self, path: str) -> Any:
        """Return what it answers, or None where it does not."""
        try:
            with urllib.request.urlopen(self._url + path, timeout=10) as answer:
                return json.load(answer)
        except (urllib.error.URLError, ConnectionError):
            return None


def contents(client: redis.Redis) -> Iterator[bytes]:
    """Yield everything that a Redis holds: keys, values, and the bodies within them as they were before encoding."""
    for key in client.scan_iter():
        yield key
        match client.type(key):
            case b"list":
                values = client.lrange(key, 0, -1)
            case b"hash":
                values = [part for item in client.hgetall(key).items() for part in item]
            case b"set":
                values = list(client.smembers(key))
            case b"zset":
                values = client.zrange(key, 0, -1)
            case _:
                values = [client.get(key)]
        yield from values
        yield from (body(value) for value in values if b'"body_encoding"' in value)


def body(value: bytes) -> bytes:
    """Return the body of a message, be it in a queue or, with where it came from, in the hands of an owner."""
    found = json.loads(value)
    return base64.b64decode((found[0] if isinstance(found, list) else found)["body"])


def waiting(client: redis.Redis) -> list[bytes]:
    """Return the messages of the owner queue, if a reservation is among them."""
    messages = client.lrange(PREFIX + "owner", 0, -1)
    return messages if any(b"child.reserve" in body(message) for message in messages) else []


def without_bodies(messages: list[bytes]) -> str:
    """Return messages as anybody sees them who reads no bodies."""
    seen = [{name: part for name, part in json.loads(message).items() if name != "body"} for message in messages]
    return json.dumps(seen)


def test_flower_shows_ids_and_nobody_sees_a_secret(spawn, tmp_path, sqlite_url, redis_url):
    fleet = Fleet(spawn, tmp_path, ledger=sqlite_url, broker=redis_url)
    owner = fleet.owner()
    flower = Flower(fleet)
    with (
        fleet.client() as client,
        Execution.start(client, "s", secret=SECRET) as run,
        closing(redis_client(redis_url)) as redis,
    ):
        received = overhear(run)
        says(run, PAYLOAD)
        child = run.reserve_child(secret=CHILD_SECRET)
        assert isinstance(child, Execution)
        says(child, PAYLOAD)
        hidden = [part for one in (run, child) for part in (one._secret, secret_digest(one._secret), one._stream.claim)]
        fleet.freeze(owner)
        submit(run, [PAYLOAD])
        reservation = run.submit("child.reserve", {"secret_digest": secret_digest(CHILD_SECRET[::-1])})
        hidden.append(secret_digest(CHILD_SECRET[::-1]))
        public = without_bodies(wait_until(lambda: waiting(redis), within=20, what="a reservation waits"))
        held = b"\n".join(contents(redis))
        owner.signal(signal.SIGCONT)
        reservation.result(30)
        ids = (f"register:{run.execution_id}:", f"{run.execution_id}:1-1@1:", f"{child.execution_id}:1-1@1:")
        tasks = wait_until(lambda: shown(flower, *ids), within=20, what="Flower shows the tasks")
        run.finish()
    workers = flower.get("workers?refresh=1")
    told = "\n".join([json.dumps(tasks), json.dumps(workers), owner.output, flower.process.output, public])
    assert any(name.startswith("owner-1@") for name in workers)
    assert {task["name"] for task in tasks.values()} >= {"tenure.apply", "tenure.control"}
    assert PAYLOAD.encode() in held  # in the body of a message, which is for the owner
    assert PAYLOAD not in told
    for secret in hidden:
        assert secret.encode() not in held
        assert secret not in told
        assert secret not in json.dumps(received)
    flower.process.signal(signal.SIGTERM)
    assert flower.process.wait(within=10) == 0


def shown(flower: Flower, *beginnings: str) -> dict[str, Any]:
    """Return the tasks that Flower shows, once there is one with each of these beginnings of an id."""
    tasks: dict[str, Any] = flower.get("tasks") or {}
    there = all(any(task.startswith(beginning) for task in tasks) for beginning in beginnings)
    return tasks if there else {}


def overhear(run: Execution) -> list[object]:
    """Keep every reply that this process reads, as it stood in the reply queue."""
    listener, received = run.client._transport._listener, []
    deliver = listener._deliver

    def keep(body: object) -> None:
        received.append(body)
        deliver(body)

    listener._deliver = keep
    return received
