"""Runs the demonstration: starts the processes, kills the owner in mid-run, waits for the end, audits."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from tenure.config import Settings
from tenure.ledger import Ledger, Limits, ownership, reads
from tenure.ledger.errors import ConfigurationError
from tenure.ledger.migrate import upgrade
from tenure.supervisor import Role, Supervisor, beat_command, environment, owner_command, worker_command
from tenure.tasks import keys
from tenure.tasks.application import make_app
from tenure.tasks.broker import EmbeddedBroker

from .audit import audit
from .stage import POLL_SECONDS, Event, Plan, Stage
from .trajectory import CHILD, PARENT, load
from .view import LiveView, PlainView, View

SESSION = "demo"
DEADLINE_SECONDS = 90.0
_STORY = ("refused", "lost", "replayed", "killed", "takeover", "adopted", "retired", "gathered")


def run_demo(*, trajectory: Path | None, seed: int, keep: bool, console: Console) -> bool:
    """Run it; returns whether the audit was clean.

    Raises:
        ConfigurationError: the trajectory is not one.
        Unavailable: a process could not be started.
    """
    parent = (trajectory or PARENT).resolve()
    plan = Plan.make(seed, parent, CHILD, (len(load(parent)), len(load(CHILD))))
    folder = Path(tempfile.mkdtemp(prefix="tenure-demo-"))
    try:
        return _run(folder, plan, console)
    finally:
        if keep:
            console.print(f"kept: TENURE_STATE_DIR={folder} tenure executions", soft_wrap=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _run(folder: Path, plan: Plan, console: Console) -> bool:
    began = time.monotonic()
    settings, environ = _settings(folder)
    keys.create(settings.keys, settings.principal)
    upgrade(settings.ledger_url)
    stage = Stage(folder)
    view: View = LiveView(console) if console.is_terminal else PlainView(console)
    limits = Limits(settings.max_concurrent_children, settings.max_spawn_depth)
    with Ledger.open(settings.ledger_url, limits=limits) as ledger:
        with view, _processes(settings, environ, stage) as supervisor:
            _play(plan, stage, ledger, supervisor, view)
        problems = [*audit(ledger, SESSION, plan), *_missing(stage)]
        _report(ledger, problems, console, time.monotonic() - began)
    return not problems


def _settings(folder: Path) -> tuple[Settings, dict[str, str]]:
    given = {
        "TENURE_STATE_DIR": str(folder),
        "TENURE_MAX_CONCURRENT_CHILDREN": "2",
        "TENURE_RESEND_SECONDS": "0.4",
        "TENURE_RECOVERY_SECONDS": "5",
        "TENURE_IMPORTS": "tenure.demo.worker",
    }
    return Settings.from_environ(given), environment(given)


@contextmanager
def _processes(settings: Settings, environ: dict[str, str], stage: Stage) -> Iterator[Supervisor]:
    def tell(text: str) -> None:
        stage.tell("demo", "process", text)

    with EmbeddedBroker(settings.state_dir) as broker:
        tell(f"broker: {broker.description}")
        with Supervisor(settings.state_dir / "logs", environ, tell) as supervisor:
            for name in ("owner-1", "owner-2"):
                supervisor.start(Role(name, owner_command(settings, name)))
            supervisor.start(Role("worker", worker_command(settings, concurrency=3)))
            supervisor.start(Role("beat", beat_command(settings)))
            tell("two owners (one stands by), beat, and a worker of three processes are starting")
            yield supervisor


def _play(plan: Plan, stage: Stage, ledger: Ledger, supervisor: Supervisor, view: View) -> None:
    settings = Settings.from_environ(supervisor.environ)
    make_app(settings).send_task(
        "tenure.demo.parent", args=[SESSION, plan.to_json()], argsrepr="<plan>", ignore_result=True
    )
    shown = 0
    first_epoch: int | None = None
    deadline = time.monotonic() + DEADLINE_SECONDS
    finished = False
    while not finished:
        if time.monotonic() > deadline:
            raise TimeoutError(_why_not(stage, supervisor))
        supervisor.watch()
        finished = stage.has("finished", who="parent")
        events = list(stage.events())
        for event in events[shown:]:
            view.show(event)
        shown = len(events)
        if first_epoch is None and _halfway(events):
            first_epoch = _kill_owner(settings, ledger, supervisor, stage)
        elif first_epoch is not None and not stage.has("takeover"):
            _tell_takeover(ledger, stage, first_epoch)
        view.refresh(ledger)
        time.sleep(POLL_SECONDS)


def _halfway(events: list[Event]) -> bool:
    return {event.who for event in events if event.what == "halfway"} >= {"parent", "child 1", "child 2"}


def _kill_owner(settings: Settings, ledger: Ledger, supervisor: Supervisor, stage: Stage) -> int:
    """Kill the process that owns now, which is one of ours; returns its epoch."""
    lease = ownership.current(ledger.store, settings.owner_queue)
    ours = {supervisor.pid("owner-1"): "owner-1", supervisor.pid("owner-2"): "owner-2"}
    if lease is None or lease.identity.pid not in ours:
        raise ConfigurationError("the owner's lease is not held by a process of this demonstration")
    with ledger.read() as connection:
        epoch = reads.runtime(connection).epoch
    os.kill(lease.identity.pid, signal.SIGKILL)
    stage.tell("demo", "killed", f"{ours[lease.identity.pid]}, owner of epoch {epoch}, is killed with SIGKILL")
    return epoch


def _tell_takeover(ledger: Ledger, stage: Stage, first_epoch: int) -> None:
    with ledger.read() as connection:
        now = reads.runtime(connection)
    if now.epoch > first_epoch:
        stage.tell("demo", "takeover", f"the standby has taken over: epoch {now.epoch} has begun")


def _missing(stage: Stage) -> list[str]:
    return [f"story: nothing was told of {what!r}" for what in _STORY if not stage.has(what)]


def _why_not(stage: Stage, supervisor: Supervisor) -> str:
    told = [f"{event.who}: {event.text}" for event in stage.events()][-5:]
    tail = supervisor.log("worker").read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    return "\n".join(
        [f"not finished within {DEADLINE_SECONDS:g} s; the last events and the worker's log:", *told, *tail]
    )


def _report(ledger: Ledger, problems: list[str], console: Console, seconds: float) -> None:
    with ledger.read() as connection:
        epoch = reads.runtime(connection).epoch
        executions = list(reads.executions(connection))
        messages = sum(reads.session(connection, x.session_id).message_count for x in executions)
    for problem in problems:
        console.print(problem, style="red", soft_wrap=True, markup=False)
    verdict = "the audit is clean" if not problems else f"the audit found {len(problems)} problems"
    console.print(
        f"{verdict}: {len(executions)} executions over {epoch} epochs, {messages} messages, "
        f"every transcript compared with its file; {seconds:.1f} s",
        style="bold green" if not problems else "bold red",
        soft_wrap=True,
    )
