"""An operation that kills its owner is attempted five times, then refused, and what follows it goes on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tenure.ledger import Ledger
from tenure.ledger.errors import SequenceGap, StaleEpoch, Unavailable
from tenure.ledger.schema import operation_attempts, sessions
from tests.ledger.dying_owner import Where, deadly
from tests.ledger.kit import Failing, SettableClock, Worker, dump, row, rows
from tests.processes import Spawner

POISONED = {"refused": "poisoned", "attempts": 5}


@pytest.fixture
def ran() -> list[int]:
    """What the harmless handler of this process was run for."""
    return []


@pytest.fixture
def victim(emptied_url: str, clock: SettableClock, ran: list[int]) -> Iterator[Worker]:
    """A worker whose owner, in this process, survives the deadly operation."""

    def handler() -> dict[str, Any]:
        ran.append(1)
        return {"survived": True}

    with Ledger.open(emptied_url, operations=[deadly(handler)], clock=clock) as ledger:
        yield Worker(ledger, ledger.begin_epoch("owner")).register()


@pytest.fixture
def kill(spawn: Spawner, emptied_url: str, pytestconfig: pytest.Config) -> Callable[..., None]:
    """Have owners of other processes apply the worker's next operation, and die of it."""

    def kill(worker: Worker, times: int, where: Where = Where.HANDLER) -> None:
        facts = {name: getattr(worker, name) for name in ("epoch", "execution_id", "session_id", "secret", "sequence")}
        command = (sys.executable, "-m", "tests.ledger.dying_owner")
        process = spawn(*command, emptied_url, json.dumps(facts), str(times), where, cwd=pytestconfig.rootpath)
        assert process.wait(within=60) == 0, process.output
        assert process.output.split("\n") == [*["died"] * times, ""]

    return kill


def attempts(worker: Worker) -> list[tuple[int, int]]:
    found = rows(worker.ledger, operation_attempts, execution_id=worker.execution_id)
    return [(attempt.sequence, attempt.attempts) for attempt in found]


def test_the_sixth_attempt_is_refused_and_the_next_operation_proceeds(victim, kill, ran):
    victim.say("before")
    before = dump(victim.ledger)
    kill(victim, 5)
    assert attempts(victim) == [(2, 5)]
    after = dump(victim.ledger)
    assert after | {"operation_attempts": []} == before
    receipt = victim.apply("test.deadly", careful=True)
    assert (receipt.sequence, receipt.result, ran) == (2, POISONED, [])
    assert attempts(victim) == []
    for careful in (True, False):
        assert victim.send(victim.request("test.deadly", sequence=2), careful=careful) == replace(
            receipt, replayed=True
        )
    assert victim.apply("test.deadly", careful=True).result == {"survived": True}
    assert victim.say("after").sequence == 4
    assert row(victim.ledger, sessions, session_id=victim.session_id).revision == 3


def test_attempts_count_through_restarts_and_success_clears_them(victim, kill, ran):
    kill(victim, 2)
    now = victim.ledger.begin_epoch("the next owner")
    victim.ledger.recover(now)
    before = attempts(victim)
    with pytest.raises(StaleEpoch):
        victim.send(victim.request("test.deadly"), careful=True)
    with pytest.raises(StaleEpoch):
        victim.ledger.apply(now, victim.request("test.deadly", epoch=now), careful=True)
    assert attempts(victim) == before == [(1, 2)]
    victim.adopt(now)
    kill(victim, 2)
    assert attempts(victim) == [(1, 4)]
    assert victim.apply("test.deadly", careful=True).result == {"survived": True}
    assert (attempts(victim), ran) == ([], [1])


@pytest.mark.parametrize("where", [Where.BEFORE_COMMIT, Where.AFTER_COMMIT])
def test_a_death_at_the_commit_is_an_attempt_only_where_it_comes_before(victim, kill, ran, where):
    kill(victim, 1, where)
    committed = where is Where.AFTER_COMMIT
    assert attempts(victim) == ([] if committed else [(1, 1)])
    receipt = victim.apply("test.deadly", careful=True)
    assert receipt.replayed == committed
    assert len(ran) == (0 if committed else 1)
    assert attempts(victim) == []


def test_an_attempt_is_there_before_the_handler_runs(emptied_url, clock):
    seen: list[Any] = []

    def handler() -> dict[str, Any]:
        seen.append(attempts(worker))
        return {}

    with Ledger.open(emptied_url, operations=[deadly(handler)], clock=clock) as ledger:
        worker = Worker(ledger, ledger.begin_epoch("owner")).register()
        worker.apply("test.deadly", careful=True)
        assert seen == [[(1, 1)]]
        assert attempts(worker) == []


def test_what_did_not_kill_its_process_does_not_count(victim, ran):
    """A sender that goes on sending, a database that gives way: neither may poison what comes in the end."""
    request = victim.request("test.deadly")
    for _ in range(10):
        with pytest.raises(SequenceGap):
            victim.send(victim.request("test.deadly", sequence=2), careful=True)
        with Failing(victim.ledger, "commit", number=2), pytest.raises(Unavailable):
            victim.send(request, careful=True)
    assert {count for _, count in attempts(victim)} <= {0}
    assert victim.send(request, careful=True).result == {"survived": True}
    assert victim.send(victim.request("test.deadly", sequence=2), careful=True).result == {"survived": True}
    assert attempts(victim) == []
    assert len(ran) == 12


def test_without_care_nothing_is_counted(victim):
    with Failing(victim.ledger, "commit"), pytest.raises(Unavailable):
        victim.apply("test.deadly")
    assert attempts(victim) == []
    victim.apply("test.deadly")
    assert dump(victim.ledger)["operation_attempts"] == []
