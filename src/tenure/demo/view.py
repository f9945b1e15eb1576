"""What a person sees of the demonstration: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tenure.ledger import Ledger, Status, reads
from tenure.ledger.errors import Unavailable
from tenure.ledger.transaction import Execution

from .stage import Event

_STYLES = {
    Status.REGISTERED: "cyan",
    Status.RUNNING: "green",
    Status.UNKNOWN: "yellow",
    Status.TERMINAL: "dim",
}
_LINES = 16


class View(Protocol):
    """Shows events as they come."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""

    def show(self, event: Event) -> None:
        """Show one event."""

    def refresh(self, ledger: Ledger) -> None:
        """Show how the ledger stands now."""


class PlainView:
    """One line for each event."""

    def __init__(self, console: Console) -> None:
        self._console, self._began = console, time.time()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, event: Event) -> None:
        """Print it."""
        self._console.print(_line(event, self._began), soft_wrap=True)

    def refresh(self, ledger: Ledger) -> None:
        """Plain lines have no state to show."""


class LiveView:
    """The executions as they stand, and the last events below."""

    def __init__(self, console: Console) -> None:
        self._began = time.time()
        self._events: list[Event] = []
        self._live = Live(console=console, refresh_per_second=10, transient=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, event: Event) -> None:
        """Keep it for the next refresh."""
        self._events.append(event)

    def refresh(self, ledger: Ledger) -> None:
        """Draw the table anew."""
        try:
            with ledger.read() as connection:
                epoch = reads.runtime(connection).epoch
                executions = reads.tree(reads.executions(connection))
                lengths = {x.session_id: reads.session(connection, x.session_id).message_count for x in executions}
        except Unavailable:  # busy for a moment; the next refresh shows it
            return
        events = Group(*(_line(event, self._began) for event in self._events[-_LINES:]))
        panel = Panel(events, title="events", title_align="left", border_style="dim")
        self._live.update(Group(executions_table(executions, lengths, epoch), panel))


def executions_table(executions: Iterable[Execution], lengths: dict[str, int], epoch: int) -> Table:
    """Return executions as a tree-like table."""
    table = Table(title=f"epoch {epoch}", title_justify="left", expand=False)
    for column in ("execution", "session", "kind", "status", "outcome", "epoch", "last sequence", "messages", "why"):
        table.add_column(column, no_wrap=True)
    for x in executions:
        indent = "  " * x.depth
        table.add_row(
            f"{indent}{x.execution_id[:12]}",
            x.session_id[:20],
            x.kind.value,
            Text(x.status.value, _STYLES[x.status]),
            x.outcome.value if x.outcome else "",
            str(x.epoch),
            str(x.last_sequence),
            str(lengths.get(x.session_id, "")),
            x.status_reason,
        )
    return table


def _line(event: Event, began: float) -> Text:
    style = {"killed": "bold red", "takeover": "bold green", "refused": "yellow", "lost": "yellow"}.get(event.what, "")
    return Text.assemble((f"{event.at - began:6.2f} s  ", "dim"), (f"{event.who:<8}", "cyan"), (event.text, style))
