"""The command line."""

from __future__ import annotations

import getpass
import json
import logging
import os
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console

from tenure import __version__
from tenure.config import Settings
from tenure.ledger import Ledger, Limits, ownership, reads
from tenure.ledger.errors import ConfigurationError, NotFound, TenureError
from tenure.ledger.laws import LAWS, audit
from tenure.ledger.migrate import head, revision, upgrade
from tenure.ledger.store import Store

TROUBLE = 1
_console = Console(highlight=False)


class Commands(click.Group):
    """A group whose commands end with one line, never with a traceback, when something is not as it must be."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except TenureError as error:
            fail(error.detail if isinstance(error, ConfigurationError) else error.explain())
        except TimeoutError as error:
            fail(str(error))
        except BrokenPipeError:  # whoever reads the output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(TROUBLE) from None
        except OSError as error:
            fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def fail(text: str) -> NoReturn:
    """End with one line and status 1."""
    click.echo(f"tenure: {text}", err=True)
    raise SystemExit(TROUBLE)


def settings() -> Settings:
    """Return the settings of the environment."""
    return Settings.from_environ(os.environ)


def open_ledger(given: Settings) -> Ledger:
    """Open the ledger of the settings; for the embedded default, make it first."""
    if "TENURE_LEDGER_URL" not in given.given:
        given.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    limits = Limits(given.max_concurrent_children, given.max_spawn_depth)
    return Ledger.open(given.ledger_url, limits=limits)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tenure")
def main() -> None:
    """Durable, owned and bounded work on a Celery fleet.

    Settings come from TENURE_* variables; `tenure settings` lists them.
    """


@main.command()
@click.option("--trajectory", type=click.Path(path_type=Path), help="Play this recorded run (JSON with a `history`).")
@click.option("--seed", type=click.IntRange(0), help="Repeat the run with this seed.")
@click.option("--keep", is_flag=True, help="Leave the ledger and the logs to look at.")
def demo(trajectory: Path | None, seed: int | None, keep: bool) -> None:
    """Play a recorded agent run on real processes while its owner is killed, and audit the ledger."""
    from tenure.demo.director import run_demo

    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    _console.print(f"seed {seed}")
    if not run_demo(trajectory=trajectory, seed=seed, keep=keep, console=_console):
        raise SystemExit(TROUBLE)


@main.command()
@click.option("--app", default="tenure.workflows", show_default=True, help="The worker's Celery application.")
@click.option("--concurrency", type=click.IntRange(1, 256), default=2, show_default=True, help="Worker processes.")
@click.option("--flower-port", type=click.IntRange(1, 65535), default=5555, show_default=True)
def up(app: str, concurrency: int, flower_port: int) -> None:
    """Run owner, beat, a worker and, where it is installed, Flower on this machine.

    On the embedded default this also keeps the broker and makes the ledger; with URLs given it uses those.
    """
    from tenure.up import run_up

    run_up(settings(), app=app, concurrency=concurrency, flower_port=flower_port, tell=_tell)


def _tell(text: str) -> None:
    _console.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False, soft_wrap=True)


@main.command()
def owner() -> None:
    """Run an owner in this process; it stands by while another one is at work."""
    from tenure.supervisor import owner_command

    given = settings()
    _become(owner_command(given, f"owner-{os.getpid()}"))


@main.command()
def beat() -> None:
    """Run beat in this process: recovery on a schedule."""
    from tenure.supervisor import beat_command

    _become(beat_command(settings()))


@main.command()
def probe() -> None:
    """Vouch for this host's worker processes, so that the owner knows at once when one has died.

    Every host with workers needs one, but for the owner's own.
    """
    from tenure.tasks.probe import Probe
    from tenure.workflows import Client

    given = settings()
    logging.basicConfig(level=given.log_level, format="%(asctime)s %(levelname)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with Client.connect(given) as client:
        running = Probe(client, lease_seconds=given.lease_seconds)
        running.run(stop.is_set)
        running.close()


def _become(command: list[str]) -> NoReturn:
    sys.stdout.flush()
    os.execv(command[0], command)  # noqa: S606 (the command is ours)


@main.command()
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="Violations shown of each law.")
def verify(limit: int) -> None:
    """Check every law over the ledger; status 1 if one is broken."""
    with open_ledger(settings()) as ledger, ledger.read() as connection:
        found: Counter[str] = Counter()
        for violation in audit(connection, ledger.limits):
            found[violation.law] += 1
            if found[violation.law] <= limit:
                click.echo(f"{violation.law}: {violation.table} {json.dumps(violation.key)}: {violation.detail}")
    if found:
        fail(f"{found.total()} violations of {len(found)} laws")
    click.echo(f"{len(LAWS)} laws hold")


@main.command()
@click.option("--live", is_flag=True, help="Only executions that have not ended.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def executions(live: bool, as_json: bool) -> None:
    """Show the tree of executions."""
    from tenure.demo.view import executions_table

    with open_ledger(settings()) as ledger, ledger.read() as connection:
        epoch = reads.runtime(connection).epoch
        found = reads.tree(reads.executions(connection, live_only=live))
        lengths = {x.session_id: reads.session(connection, x.session_id).message_count for x in found}
    if _console.is_terminal and not as_json:
        _console.print(executions_table(found, lengths, epoch))
        return
    for x in found:
        facts = _facts(x) | {"messages": lengths[x.session_id]}
        click.echo(json.dumps(facts) if as_json else _line(facts))


def _facts(x: Any) -> dict[str, Any]:
    names = ("execution_id", "session_id", "kind", "status", "outcome", "parent_execution_id", "depth", "epoch")
    more = ("generation", "last_sequence", "status_reason", "status_by")
    return {name: getattr(x, name) for name in names + more}


def _line(facts: dict[str, Any]) -> str:
    state = f"{facts['status']}" + (f"/{facts['outcome']}" if facts["outcome"] else "")
    where = f"session={facts['session_id']} epoch={facts['epoch']} last={facts['last_sequence']}"
    indent = "  " * facts["depth"]
    return f"{indent}{facts['execution_id']} {state} {where} messages={facts['messages']} why={facts['status_reason']}"


@main.command()
@click.argument("session")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def transcript(session: str, as_json: bool) -> None:
    """Print the messages of SESSION."""
    with open_ledger(settings()) as ledger, ledger.read() as connection:
        try:
            messages = reads.transcript(connection, session)
        except NotFound:
            fail(f"there is no session {session!r}; `tenure executions` lists them")
        for position, message in enumerate(messages, 1):
            click.echo(json.dumps(message, ensure_ascii=False) if as_json else _readable(position, message))


def _readable(position: int, message: dict[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return f"[{position}] {message['role']}\n{text}\n"


@main.command()
def status() -> None:
    """Show the epoch, the owner's lease and how much is live."""
    given = settings()
    with open_ledger(given) as ledger:
        with ledger.read() as connection:
            now = reads.runtime(connection)
        lease = ownership.current(ledger.store, given.owner_queue)
    click.echo(f"epoch       {now.epoch}" + (f", since {now.began_at:%Y-%m-%d %H:%M:%S} UTC" if now.began_at else ""))
    click.echo(f"live        {now.live} executions")
    click.echo(f"draining    {now.drain_reason or 'no'}")
    held = f"process {lease.identity.pid}, for {lease.expires_in:.1f} s more" if lease else "nobody"
    click.echo(f"lease       {held}")


@main.command()
@click.option("--reason", default="operator", show_default=True, help="What those who are refused are told.")
@click.option("--off", is_flag=True, help="Take registers and reservations again.")
@click.option("--wait", is_flag=True, help="Return when no execution is live.")
@click.option("--within", type=click.FloatRange(0), default=3600.0, show_default=True, help="Seconds to wait.")
def drain(reason: str, off: bool, wait: bool, within: float) -> None:
    """Refuse registers and child reservations; everything else goes on."""
    with open_ledger(settings()) as ledger:
        ledger.drain(None if off else reason)
        if off:
            click.echo("registers and reservations are taken again")
            return
        _wait_until_drained(ledger, within if wait else 0.0)


def _wait_until_drained(ledger: Ledger, within: float) -> None:
    deadline = time.monotonic() + within
    while True:
        with ledger.read() as connection:
            live = reads.runtime(connection).live
        if live == 0 or time.monotonic() >= deadline:
            break
        time.sleep(min(0.5, within))
    click.echo("drained" if live == 0 else f"draining: {live} executions are live")


@main.command()
@click.argument("execution")
def discard(execution: str) -> None:
    """End EXECUTION for good; it must be `unknown`."""
    by = f"{getpass.getuser()}@{socket.gethostname()}"
    with open_ledger(settings()) as ledger:
        hold = ledger.discard(execution, by=by)
    click.echo(f"{hold.execution_id} is {hold.status}")


@main.command("keys")
def make_keys() -> None:
    """Make the key file, with one principal that may do everything, unless there is one."""
    from tenure.tasks.keys import create

    given = settings()
    made = create(given.keys, given.principal)
    click.echo(f"{given.keys}: {'made' if made else 'there already'}")


@main.command("settings")
def show_settings() -> None:
    """List every setting, its value and where it comes from."""
    for one in settings().describe():
        click.echo(f"{one.name:<32} {one.value}  ({one.source})")


@main.group()
def db() -> None:
    """The ledger's schema."""


@db.command("upgrade")
def db_upgrade() -> None:
    """Bring the ledger to the schema that this version reads."""
    given = settings()
    if "TENURE_LEDGER_URL" not in given.given:
        given.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    click.echo(f"the ledger is at {upgrade(given.ledger_url)}")


@db.command("current")
def db_current() -> None:
    """Show the schema's revision, and the one that this version needs."""
    store = Store(settings().ledger_url)
    click.echo(f"the ledger is at {revision(store) or 'nothing'}, this version needs {head()}")
    store.close()
