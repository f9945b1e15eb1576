"""Operations of an application: found, run with a unit of work of their own tables, and kept from doing harm."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from sqlalchemy import (
    BigInteger,
    Column,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    insert,
    select,
    text,
)

from tenure.ledger import Ledger, Operation, Refusal, Work, operation
from tenure.ledger.errors import AdmissionConflict, ConfigurationError, InvalidParams, NotFound, Unavailable
from tenure.ledger.operations import BUILTIN, Registry
from tenure.ledger.schema import messages, sessions, worker_receipts
from tests.ledger.kit import SettableClock, Worker, database_fault, dump, row, rows

shop = MetaData()
customers = Table("shop_customers", shop, Column("name", String(32), primary_key=True))
invoices = Table(
    "shop_invoices",
    shop,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("customer", String(32), ForeignKey("shop_customers.name", deferrable=True, initially="DEFERRED")),
    Column("cents", BigInteger, nullable=False),
    UniqueConstraint("customer", "cents"),
)


class Invoice(msgspec.Struct, forbid_unknown_fields=True):
    number: int
    cents: int
    customer: str | None = None


@operation("invoice.add")
def add_invoice(work: Work, payload: Invoice) -> dict[str, Any] | Refusal:
    if payload.cents <= 0:
        return Refusal("no_amount", {"cents": payload.cents})
    work.insert(invoices, number=payload.number, cents=payload.cents, customer=payload.customer)
    total = work.execute(select(invoices.c.cents)).scalars().all()
    return {"number": payload.number, "total": sum(total)}


@dataclasses.dataclass
class Nothing:
    """A payload that has no fields."""


def failing(fail: Callable[[Work], Any]) -> Operation[Nothing]:
    """Make an operation that changes all it can and then fails in this way."""

    @operation("shop.fail")
    def handler(work: Work, payload: Nothing) -> dict[str, Any]:
        work.insert(invoices, number=99, cents=99)
        work.session.message_count += 7
        work.session.model = "half-written"
        work.execution.last_sequence += 7
        work.execute(insert(customers).values(name="half"))
        work.touch()
        result: dict[str, Any] = fail(work)
        return result

    return handler


@pytest.fixture
def open_shop(emptied_url: str, clock: SettableClock) -> Iterator[Callable[..., Worker]]:
    """Open a ledger with operations and return a worker on it; the shop's tables go with the test."""
    opened: list[Ledger] = []

    def open_with(*operations: Operation[Any]) -> Worker:
        ledger = Ledger.open(emptied_url, operations=operations, clock=clock)
        opened.append(ledger)
        with ledger.store.write() as connection:
            shop.create_all(connection)
        return Worker(ledger, ledger.begin_epoch("owner")).register()

    yield open_with
    for ledger in opened:
        with ledger.store.write() as connection:
            shop.drop_all(connection)
        ledger.close()


def test_an_operation_of_an_application_is_an_operation(open_shop):
    worker = open_shop(add_invoice)
    first = worker.apply("invoice.add", {"number": 1, "cents": 250})
    assert first.result == {"number": 1, "total": 250}
    assert worker.apply("invoice.add", {"number": 2, "cents": 50}).result["total"] == 300
    again = worker.send(worker.request("invoice.add", {"number": 1, "cents": 250}, sequence=1))
    assert again == replace(first, replayed=True)
    assert [invoice.number for invoice in rows(worker.ledger, invoices)] == [1, 2]
    assert row(worker.ledger, sessions, session_id=worker.session_id).revision == 2
    refused = worker.apply("invoice.add", {"number": 3, "cents": 0})
    assert refused.result == {"refused": "no_amount", "cents": 0}
    assert row(worker.ledger, sessions, session_id=worker.session_id).revision == 2


def test_its_payload_is_closed_and_typed(open_shop):
    worker = open_shop(add_invoice)
    for payload in ({"number": 1}, {"number": "1", "cents": 1}, {"number": 1, "cents": 1, "vat": 0}):
        with pytest.raises(InvalidParams, check=lambda error: error.detail.startswith("invoice.add: ")):
            worker.apply("invoice.add", payload)
    assert rows(worker.ledger, invoices) == []


def test_it_is_found_by_its_entry_point(open_shop, monkeypatch):
    install(monkeypatch, [importlib.metadata.EntryPoint("invoice", f"{__name__}:add_invoice", "tenure.operations")])
    worker = open_shop()
    assert worker.apply("invoice.add", {"number": 1, "cents": 250}).refused is None


def install(monkeypatch: pytest.MonkeyPatch, points: list[importlib.metadata.EntryPoint]) -> None:
    """Have these entry points installed, and ask for no others."""

    def entry_points(*, group: str) -> list[importlib.metadata.EntryPoint]:
        return [point for point in points if point.group == group]

    monkeypatch.setattr("tenure.ledger.operations.registry.entry_points", entry_points)


def test_an_entry_point_that_is_no_operation_is_refused(monkeypatch):
    install(monkeypatch, [importlib.metadata.EntryPoint("bad", "json:loads", "tenure.operations")])
    with pytest.raises(ConfigurationError, check=lambda error: "json:loads is not an @operation" in error.detail):
        Registry(BUILTIN)


def test_an_entry_point_is_loaded_by_its_name(monkeypatch):
    point = importlib.metadata.EntryPoint("finish", "tenure.ledger.operations.builtin:session_end", "tenure.operations")
    install(monkeypatch, [point])
    assert "session.end" in {known.name for known in Registry(())}
    assert len(list(Registry(BUILTIN))) == len(BUILTIN)  # the same object under its own name is no clash


def test_a_name_that_is_taken_is_refused(emptied_url, monkeypatch):
    @operation("session.end")
    def usurper(work: Work, payload: Nothing) -> dict[str, Any]:
        return {}

    for operations in ([usurper], [add_invoice, replace(add_invoice)]):
        with pytest.raises(ConfigurationError, check=lambda error: "the name is taken" in error.detail):
            Ledger.open(emptied_url, operations=operations)


@pytest.mark.parametrize("name", ["append", "Invoice.add", "invoice.", ".add", "invoice add", "invoice.add\n", ""])
def test_a_name_is_dotted_lower_case(name):
    with pytest.raises(ConfigurationError):
        operation(name)


def test_a_handler_is_annotated():
    def nothing_said(work, payload):  # type: ignore[no-untyped-def]
        return {}

    with pytest.raises(ConfigurationError, check=lambda error: "takes an annotated Work and payload" in error.detail):
        operation("shop.untyped")(nothing_said)


class Odd(BaseException):
    """What no `except Exception` catches."""


def raises(error: BaseException) -> Callable[[Work], Any]:
    def fail(_work: Work) -> Any:
        raise error

    return fail


FAILURES: dict[str, tuple[Callable[[Work], Any], str]] = {
    "ValueError": (raises(ValueError("x")), "ValueError"),
    "a tenure error": (raises(NotFound("x")), "NotFound"),
    "unavailable, it says": (raises(Unavailable("x")), "Unavailable"),
    "SystemExit": (raises(SystemExit(3)), "SystemExit"),
    "KeyboardInterrupt": (raises(KeyboardInterrupt()), "KeyboardInterrupt"),
    "CancelledError": (raises(asyncio.CancelledError()), "CancelledError"),
    "GeneratorExit": (raises(GeneratorExit()), "GeneratorExit"),
    "another BaseException": (raises(Odd()), "Odd"),
    "RecursionError": (lambda work: recurse(), "RecursionError"),
    "a taken key": (lambda work: work.insert(invoices, number=99, cents=1), "IntegrityError"),
    "a taken key, at once": (lambda work: work.execute(insert(customers).values(name="half")), "IntegrityError"),
    "a missing value": (lambda work: work.insert(invoices, number=100), "IntegrityError"),
    "a broken reference": (lambda work: work.insert(messages, **orphan()), "IntegrityError"),
    "a broken reference, told at the commit": (
        lambda work: {"added": work.insert(invoices, number=100, cents=1, customer="nobody")},
        "IntegrityError",
    ),
    "nothing": (lambda work: None, "TypeError"),
    "a list": (lambda work: [1], "TypeError"),
    "a receipt's text": (lambda work: "{}", "TypeError"),
    "a result that is no JSON": (lambda work: {"at": work.now}, "InvalidParams"),
    "a result that is not finite": (lambda work: {"at": float("nan")}, "InvalidParams"),
    "a result of 4 MiB": (lambda work: {"text": "x" * 2**22}, "InvalidParams"),
    "a refusal that is no JSON": (lambda work: Refusal("no", {"at": work.now}), "InvalidParams"),
}


def recurse() -> Any:
    return recurse()


def orphan() -> dict[str, Any]:
    return {
        "session_id": "no such session",
        "position": 1,
        "execution_id": "x",
        "sequence": 1,
        "role": "user",
        "body": "{}",
        "created_at": SettableClock()(),
    }


def fails_with_a_receipt(worker: Worker, error: str, *, careful: bool = False) -> None:
    """Apply `shop.fail`; it must leave its receipt and nothing else, and the next sequence must be free."""
    before = dump(worker.ledger, *shop.sorted_tables)
    receipt = worker.apply("shop.fail", careful=careful)
    assert receipt.result == {"refused": "operation_failed", "error": error}
    after = dump(worker.ledger, *shop.sorted_tables)
    assert len(after["worker_receipts"]) == len(before["worker_receipts"]) + 1
    assert after["sessions"] == before["sessions"]
    for name in before.keys() - {"worker_receipts", "worker_executions", "execution_transitions"}:
        assert after[name] == before[name], name
    again = worker.send(worker.request("shop.fail", sequence=receipt.sequence), careful=careful)
    assert again == replace(receipt, replayed=True)
    assert worker.say("the next sequence").sequence == receipt.sequence + 1


def test_whatever_a_handler_raises_becomes_its_receipt(open_shop, subtests):
    def fail(work: Work) -> Any:
        return failure(work)

    worker = open_shop(failing(fail))
    with ThreadPoolExecutor(1) as pool:  # a KeyboardInterrupt of the main thread is the user's
        for number, (what, (failure, error)) in enumerate(FAILURES.items()):  # noqa: B007 (`fail` reads it)
            with subtests.test(what):
                pool.submit(fails_with_a_receipt, worker, error, careful=bool(number % 2)).result()


def test_a_keyboard_interrupt_in_the_main_thread_is_the_users(open_shop):
    assert threading.current_thread() is threading.main_thread()
    worker = open_shop(failing(raises(KeyboardInterrupt())))
    before = dump(worker.ledger, *shop.sorted_tables)
    with pytest.raises(KeyboardInterrupt):
        worker.apply("shop.fail")
    assert dump(worker.ledger, *shop.sorted_tables) == before
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fails_with_a_receipt, worker, "KeyboardInterrupt").result()


WRONG_SQL = ["SELECT * FROM no_such_table", "SELEKT 1", "SELECT no_such_column FROM sessions", "SELECT 1 / 'x' :: y"]


@pytest.mark.parametrize("statement", WRONG_SQL)
def test_wrong_sql_is_the_handlers_failure_not_the_databases(open_shop, statement):
    worker = open_shop(failing(lambda work: work.execute(text(statement))))
    receipt = worker.apply("shop.fail")
    assert receipt.refused == "operation_failed"
    assert receipt.result["error"] in {"OperationalError", "ProgrammingError"}
    assert rows(worker.ledger, invoices) == []


def test_what_a_statement_can_never_do_is_the_handlers_failure(open_shop):
    """Limits that no patience changes must not be told as `later`, or the operation would block its stream for ever."""
    worker = open_shop(failing(too_much))
    assert worker.apply("shop.fail").refused == "operation_failed"
    assert worker.say("the next sequence").sequence == 2


def too_much(work: Work) -> Any:
    if work.tx.connection.dialect.name == "sqlite":
        return work.execute(text("SELECT zeroblob(2000000000)"))
    return work.execute(text("SELECT array_fill(0, ARRAY[2000000000])"))


def test_a_database_that_gives_way_in_a_handler_is_unavailable(open_shop):
    def fail(work: Work) -> Any:
        raise database_fault(work_ledger)

    worker = open_shop(failing(fail))
    work_ledger = worker.ledger
    before = dump(worker.ledger, *shop.sorted_tables)
    with pytest.raises(Unavailable):
        worker.apply("shop.fail")
    assert dump(worker.ledger, *shop.sorted_tables) == before


def test_a_handler_sees_what_it_has_changed_and_may_run_again(open_shop):
    seen: list[int] = []

    @operation("shop.look")
    def look(work: Work, payload: Nothing) -> dict[str, Any]:
        work.insert(invoices, number=1, cents=5)
        found = work.execute(select(invoices.c.number)).scalars().all()
        seen.append(len(found))
        if len(seen) == 1:
            raise database_fault(worker.ledger)
        return {"found": list(found), "sequence": work.sequence, "now": work.now.isoformat()}

    worker = open_shop(look)
    with pytest.raises(Unavailable):
        worker.apply("shop.look")
    assert worker.apply("shop.look").result == {
        "found": [1],
        "sequence": 1,
        "now": worker.ledger.clock().isoformat(),
    }
    assert seen == [1, 1]


def test_the_same_payload_under_another_operation_is_another_operation(open_shop):
    @operation("shop.ping")
    def ping(work: Work, payload: Nothing) -> dict[str, Any]:
        return {}

    worker = open_shop(ping)
    worker.apply("shop.ping")
    before = dump(worker.ledger)
    with pytest.raises(AdmissionConflict, check=lambda error: error.data == {"operation": "shop.ping"}):
        worker.send(worker.request("execution.finish", {}, sequence=1))
    assert dump(worker.ledger) == before


def test_a_handler_that_changes_nothing_moves_no_revision(open_shop):
    @operation("shop.ping")
    def ping(work: Work, payload: Nothing) -> dict[str, Any]:
        return {"pong": work.execute(select(sessions.c.session_id)).scalars().all()}

    worker = open_shop(ping)
    assert worker.apply("shop.ping").result == {"pong": [worker.session_id]}
    assert row(worker.ledger, sessions, session_id=worker.session_id).revision == 0
    assert row(worker.ledger, worker_receipts, execution_id=worker.execution_id).operation == "shop.ping"
