"""`tenure up`: every role on one machine, kept running until it is told to stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack

from tenure.config import Settings
from tenure.ledger.migrate import upgrade
from tenure.supervisor import (
    Role,
    Supervisor,
    beat_command,
    flower_command,
    owner_command,
    worker_command,
)
from tenure.tasks import keys
from tenure.tasks.broker import EmbeddedBroker

WATCH_SECONDS = 0.2


def run_up(settings: Settings, *, app: str, concurrency: int, flower_port: int, tell: Callable[[str], None]) -> None:
    """Run until SIGINT or SIGTERM.

    Raises:
        ConfigurationError, Unavailable, SchemaMismatch: one clear line of why it cannot start.
    """
    settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if keys.create(settings.keys, settings.principal):
        tell(f"made the key file {settings.keys}")
    if "TENURE_LEDGER_URL" not in settings.given:
        upgrade(settings.ledger_url)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with ExitStack() as stack:
        broker = None
        if settings.broker_url is None:
            broker = stack.enter_context(EmbeddedBroker(settings.state_dir))
            tell(broker.description)
        supervisor = stack.enter_context(Supervisor(settings.state_dir / "logs", os.environ, tell))
        for role in _roles(settings, app=app, concurrency=concurrency, flower_port=flower_port):
            tell(f"{role.name}: process {supervisor.start(role)}, log {supervisor.log(role.name)}")
        while not stop.wait(WATCH_SECONDS):
            supervisor.watch()
            if broker is not None and not broker.running:
                tell("the broker has ended; starting it again on the same data")
                broker.start()
        tell("stopping")


def _roles(settings: Settings, *, app: str, concurrency: int, flower_port: int) -> list[Role]:
    roles = [
        Role("owner", owner_command(settings)),
        Role("beat", beat_command(settings)),
        Role("worker", worker_command(settings, app=app, concurrency=concurrency)),
    ]
    if flower := flower_command(flower_port):
        roles.append(Role("flower", flower))
    return roles
