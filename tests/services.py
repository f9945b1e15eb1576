"""The services that the tests find around them, and how a test waits for something.

A service that is missing skips the tests that need it, by name; on CI it fails them, unless
TENURE_TEST_ALLOW_SKIP=1. `python -m tests.services` says what is found, and fails under the same rule.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar
from urllib.parse import urlsplit

import amqp
import psycopg
import pytest
import redis

from tenure.config import mask_url

T = TypeVar("T")

CONNECT_SECONDS = 3


def wait_until(condition: Callable[[], T], *, within: float, what: str) -> T:
    """Return the first true value of `condition`; fail with `what` if there is none in `within` seconds."""
    __tracebackhide__ = True
    deadline = time.monotonic() + within
    pause = 0.005
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {within:g} s: {what} (last seen: {value!r})")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)
    return value


def libpq_url(url: str) -> str:
    """Return the URL as psycopg reads it: without SQLAlchemy's driver."""
    return url.replace("postgresql+psycopg://", "postgresql://", 1)


def redis_client(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, socket_timeout=CONNECT_SECONDS, socket_connect_timeout=CONNECT_SECONDS)


def _probe_postgres(url: str) -> str:
    with psycopg.connect(libpq_url(url), connect_timeout=CONNECT_SECONDS) as connection:
        version = connection.info.server_version
        return f"{version // 10000}.{version % 10000}"


def _probe_redis(url: str) -> str:
    with closing(redis_client(url)) as client:
        return str(client.info("server")["redis_version"])


def _probe_rabbitmq(url: str) -> str:
    parts = urlsplit(url)
    with amqp.Connection(
        host=f"{parts.hostname}:{parts.port or 5672}",
        userid=parts.username or "guest",
        password=parts.password or "guest",
        virtual_host=parts.path[1:] or "/",
        connect_timeout=CONNECT_SECONDS,
        read_timeout=CONNECT_SECONDS,
    ) as connection:
        return str(vars(connection)["server_properties"]["version"])


@dataclass(frozen=True)
class Service:
    """A server that some tests need; it is looked for once, when the first of them asks."""

    name: str
    variable: str  # of the environment: its URL
    default: str
    probe: Callable[[str], str]  # returns the version
    faults: tuple[type[Exception], ...]  # what the probe raises where there is no such server

    @property
    def url(self) -> str:
        return os.environ.get(self.variable, self.default)

    @cached_property
    def found(self) -> tuple[str, str]:
        """Its version, or "" and why it was not found."""
        try:
            return self.probe(self.url), ""
        except self.faults as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            return "", f"{self.name} not found at {mask_url(self.url)}: {reason}"

    @property
    def version(self) -> str:
        return self.found[0]

    @property
    def missing(self) -> str:
        return self.found[1]

    @property
    def asked(self) -> bool:
        """Whether any test has asked for it."""
        return "found" in self.__dict__


POSTGRES = Service(
    "PostgreSQL",
    "TENURE_TEST_POSTGRES",
    "postgresql+psycopg://postgres@127.0.0.1:5432/postgres",
    _probe_postgres,
    (psycopg.Error,),
)
REDIS = Service(
    "Redis",
    "TENURE_TEST_REDIS",
    "redis://127.0.0.1:6379/0",
    _probe_redis,
    (redis.RedisError, OSError),
)
RABBITMQ = Service(
    "RabbitMQ",
    "TENURE_TEST_RABBITMQ",
    "amqp://guest:guest@127.0.0.1:5672//",
    _probe_rabbitmq,
    (amqp.AMQPError, OSError),
)
SERVICES = (POSTGRES, REDIS, RABBITMQ)


def must_be_there(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a missing service is a failure: on CI, unless it is said that it is not."""
    return environ.get("CI", "").lower() in {"1", "true"} and environ.get("TENURE_TEST_ALLOW_SKIP") != "1"


@dataclass
class Needs:
    """What the tests of one run asked for and did not get."""

    unmet: Counter[str] = field(default_factory=Counter)  # tests, by the service's name

    def require(self, service: Service) -> str:
        """Return the service's URL; skip the test, or fail it on CI, if there is none."""
        if not service.missing:
            return service.url
        self.unmet[service.name] += 1
        if must_be_there():
            pytest.fail(service.missing, pytrace=False)
        pytest.skip(service.missing)

    def summary(self) -> str:
        """One line: what was found, and how many tests went without what was not."""
        told = []
        for service in SERVICES:
            if not service.asked:
                told.append(f"{service.name} not asked for")
            elif service.missing:
                verb = "failed" if must_be_there() else "skipped"
                told.append(f"{service.name} NOT FOUND ({self.unmet[service.name]} tests {verb})")
            else:
                told.append(f"{service.name} {service.version}")
        return "services: " + ", ".join(told)


def main() -> int:
    """Say what is found; return 1 if something is missing that must be there."""
    lines = [service.missing or f"{service.name} {service.version}" for service in SERVICES]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(must_be_there() and any(service.missing for service in SERVICES))


if __name__ == "__main__":
    raise SystemExit(main())
