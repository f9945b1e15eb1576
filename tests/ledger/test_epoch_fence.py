"""The fence itself: what is in flight when an epoch begins has committed before it, or fails."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import pytest
from sqlalchemy import event, text

from tenure.ledger import Ledger, Receipt, engine, epochs
from tenure.ledger.errors import OwnerSuperseded
from tenure.ledger.schema import messages, runtime_epoch, worker_receipts
from tenure.ledger.transaction import Transaction
from tests.ledger.kit import Worker, dump, row, rows
from tests.services import wait_until

HELLO = {"messages": [{"role": "user", "content": "in flight"}]}
PATIENCE = 15.0  # seconds, for what another thread has to do


class GivenUp(Exception):
    """Ends a held transaction without a commit."""


class Held:
    """A transaction in a thread of its own that has done its work and waits to be ended."""

    def __init__(self, pool: ThreadPoolExecutor, ledger: Ledger, epoch: int | None, work: Callable[[Transaction], Any]):
        self._reached, self._end, self._commit = threading.Event(), threading.Event(), True
        self.future = pool.submit(self._run, ledger, epoch, work)
        assert self._reached.wait(PATIENCE)

    def _run(self, ledger: Ledger, epoch: int | None, work: Callable[[Transaction], Any]) -> Any:
        with ledger.transaction(epoch) as tx:
            answer = work(tx)
            tx.flush()
            self._reached.set()
            assert self._end.wait(PATIENCE * 2)
            if not self._commit:
                raise GivenUp
        return answer

    def commit(self) -> Any:
        self._end.set()
        return self.future.result(PATIENCE)

    def roll_back(self) -> None:
        self._commit = False
        self._end.set()
        with pytest.raises(GivenUp):
            self.future.result(PATIENCE)


class Waiting:
    """An action in a thread of its own that has been seen to wait for the database's lock."""

    def __init__(self, pool: ThreadPoolExecutor, ledger: Ledger, action: Callable[[], Any]) -> None:
        self._sent = threading.Event()
        self.future: Future[Any] = pool.submit(self._run, ledger, action)
        assert self._sent.wait(PATIENCE)
        wait_until(lambda: waits_for_a_lock(ledger), within=PATIENCE, what="a wait for a lock")
        assert not self.future.done()

    def _run(self, ledger: Ledger, action: Callable[[], Any]) -> Any:
        me = threading.get_ident()

        def sent(*_what: object) -> None:
            if threading.get_ident() == me:
                self._sent.set()

        event.listen(ledger.store.engine, "before_cursor_execute", sent)
        try:
            return action()
        finally:
            event.remove(ledger.store.engine, "before_cursor_execute", sent)


def waits_for_a_lock(ledger: Ledger) -> bool:
    """Return whether PostgreSQL shows somebody waiting; of SQLite, which shows nobody, whether it is locked."""
    if ledger.store.dialect == "sqlite":
        with closing(sqlite3.connect(str(ledger.store.url.database), timeout=0, isolation_level=None)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                return error.sqlite_errorcode == sqlite3.SQLITE_BUSY
            return False
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with ledger.read() as connection:
        return bool(connection.execute(text(waiting)).scalar_one())


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as threads:
        yield threads


@contextmanager
def nothing_written(ledger: Ledger) -> Iterator[None]:
    before = dump(ledger)
    yield
    after = dump(ledger)
    for name in ("runtime_epoch", "epochs"):
        del before[name], after[name]
    assert after == before


def append(ledger: Ledger, worker: Worker) -> Callable[[Transaction], Receipt]:
    request = engine.read(worker.request("transcript.append", HELLO), ledger.registry)
    return lambda tx: engine.apply(tx, request)


def test_an_epoch_begins_after_what_is_in_flight_has_committed(ledger, epoch, worker, pool):
    held = Held(pool, ledger, epoch, append(ledger, worker))
    beginning = Waiting(pool, ledger, lambda: (ledger.begin_epoch("the second owner"), rows(ledger, messages)))
    assert rows(ledger, messages) == []
    assert row(ledger, runtime_epoch).epoch == epoch
    assert held.commit().result == {"positions": [1]}
    begun, seen = beginning.future.result(PATIENCE)
    assert begun == epoch + 1
    assert [message.position for message in seen] == [1]  # there when the new epoch began
    assert row(ledger, worker_receipts).epoch == epoch
    with nothing_written(ledger), pytest.raises(OwnerSuperseded):
        worker.say("too late")


def test_an_epoch_begins_after_what_is_in_flight_has_failed(ledger, epoch, worker, pool):
    with nothing_written(ledger):
        held = Held(pool, ledger, epoch, append(ledger, worker))
        beginning = Waiting(pool, ledger, lambda: ledger.begin_epoch("the second owner"))
        held.roll_back()
        assert beginning.future.result(PATIENCE) == epoch + 1


def test_what_comes_while_an_epoch_begins_is_superseded(ledger, epoch, worker, pool):
    with nothing_written(ledger):
        held = Held(pool, ledger, None, lambda tx: epochs.begin(tx, owner="the second owner"))
        late = Waiting(pool, ledger, lambda: worker.say("in flight"))
        assert held.commit() == epoch + 1
        with pytest.raises(OwnerSuperseded) as superseded:
            late.future.result(PATIENCE)
    assert superseded.value.data == {"presented": epoch, "epoch": epoch + 1}


def test_what_comes_while_an_epoch_fails_to_begin_goes_on(ledger, epoch, worker, pool):
    held = Held(pool, ledger, None, lambda tx: epochs.begin(tx, owner="the second owner"))
    waiting = Waiting(pool, ledger, lambda: worker.say("in flight"))
    held.roll_back()
    assert waiting.future.result(PATIENCE).sequence == 1
    assert row(ledger, runtime_epoch).epoch == epoch


def test_the_same_operation_at_once_is_applied_once(ledger, epoch, worker, pool):
    held = Held(pool, ledger, epoch, append(ledger, worker))
    second = Waiting(pool, ledger, lambda: worker.send(worker.request("transcript.append", HELLO)))
    first = held.commit()
    assert not first.replayed
    again = second.future.result(PATIENCE)
    assert (again.replayed, again.result) == (True, first.result)
    assert len(rows(ledger, messages)) == 1


def test_a_reader_waits_for_nobody_and_sees_one_moment(ledger, epoch, worker, pool):
    worker.say("before")
    held = Held(pool, ledger, epoch, append(ledger, worker))
    with ledger.read() as connection:
        count = lambda: len(connection.execute(messages.select()).all())  # noqa: E731
        assert count() == 1
        held.commit()
        assert count() == 1
    assert len(rows(ledger, messages)) == 2
