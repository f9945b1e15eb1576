"""Recovery: what nobody can hold any more is settled, with its reason; what is merely quiet is left alone."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tenure.ledger import Death, Ledger, Limits, reads
from tenure.ledger import recovery as recovery_module
from tenure.ledger.schema import recovery_passes, sessions, worker_executions
from tests.ledger.kit import ELSEWHERE, HERE, Worker, dump, row, rows

pytestmark = pytest.mark.usefixtures("lawful")


def execution(ledger: Ledger, worker: Worker) -> Any:
    return row(ledger, worker_executions, execution_id=worker.execution_id)


def death(worker: Worker, evidence: str = "no_such_process") -> Death:
    return Death(worker.execution_id, worker.identity, evidence)


def test_the_dead_are_told_apart_by_what_they_were(ledger, epoch, clock):
    ledger.limits = Limits(3, 3)
    root, parent, alive = (Worker(ledger, epoch).register() for _ in range(3))
    root.say("hello")
    child, sibling = parent.reserve(), parent.reserve()
    grandchild = child.reserve()
    great = grandchild.reserve()
    clock.advance(minutes=1)
    report = ledger.recover(epoch, deaths=[death(root), death(child, "reused_pid")])
    assert (report.unknown, report.discarded) == ([root.execution_id], [])
    assert sorted(report.retired) == sorted(x.execution_id for x in (child, grandchild, great))
    x = execution(ledger, root)
    assert (x.status, x.status_reason, x.status_by, x.status_at) == (
        "unknown",
        "process_dead",
        "no_such_process",
        clock.now,
    )
    assert row(ledger, sessions, session_id=root.session_id).ended_at is None
    for ended, reason in ((child, "process_dead"), (grandchild, "parent_finished"), (great, "parent_finished")):
        x, s = execution(ledger, ended), row(ledger, sessions, session_id=ended.session_id)
        assert (x.status, x.outcome, x.status_reason, x.status_by) == ("terminal", "interrupted", reason, "reused_pid")
        assert (s.end_reason, s.ended_at) == ("agent_close", clock.now)
    for living in (parent, sibling, alive):
        assert living.say("still here").refused is None


def test_a_process_that_holds_many_executions_dies_once(ledger, epoch):
    ledger.limits = Limits(3, 2)
    root = Worker(ledger, epoch).register()
    child = root.reserve()
    grandchild = child.reserve()
    with ledger.read() as connection:
        held = reads.held_on(connection, HERE.host)
    assert {found.execution_id for found in held} == {x.execution_id for x in (root, child, grandchild)}
    report = ledger.recover(epoch, deaths=[replace(found, evidence="no_such_process") for found in held])
    assert report.unknown == [root.execution_id]
    assert sorted(report.retired) == sorted([child.execution_id, grandchild.execution_id])
    with ledger.read() as connection:
        assert reads.held_on(connection, HERE.host) == []


def test_a_death_that_is_not_the_holders_changes_nothing(ledger, epoch, worker, subtests):
    child, attached = worker.reserve(), worker.reserve()
    stale = death(attached)
    attached.attach(ELSEWHERE)
    ended = Worker(ledger, epoch).register()
    ended.finish()
    lost = Worker(ledger, epoch).register()
    ledger.recover(epoch, deaths=[death(lost)])
    before = dump(ledger)
    deaths = {
        "attached meanwhile": stale,
        "nobody": replace(death(worker), execution_id="nobody"),
        "has ended": death(ended),
        "is unknown already": death(lost),
        **{
            f"another {name}": replace(death(child), identity=replace(HERE, **{name: value}))
            for name, value in (
                ("host", "host-z"),
                ("boot", "boot-2"),
                ("pid", 4243),
                ("birth", "ticks:1001"),
                ("user", "root"),
            )
        },
    }
    for what, found in deaths.items():
        with subtests.test(what):
            assert ledger.recover(epoch, deaths=[found]).empty
    after = dump(ledger)
    del before["recovery_passes"], after["recovery_passes"]
    assert after == before


def test_a_dead_roots_children_elsewhere_go_on(ledger, epoch, worker):
    attached, inside = worker.reserve(), worker.reserve()
    attached.attach(ELSEWHERE)
    report = ledger.recover(epoch, deaths=[death(worker), death(inside)])
    assert (report.unknown, report.retired) == ([worker.execution_id], [inside.execution_id])
    assert attached.say("still here").sequence == 1


def test_what_stays_unknown_is_discarded_after_its_grace(ledger, epoch, clock):
    grace = timedelta(hours=1)
    early, late, adopted = (Worker(ledger, epoch).register() for _ in range(3))
    child = early.reserve()
    child.attach(ELSEWHERE)
    ledger.recover(epoch, deaths=[death(early), death(adopted)])
    clock.advance(minutes=30)
    ledger.recover(epoch, deaths=[death(late)])
    adopted.adopt(epoch)
    clock.advance(minutes=29, seconds=59)
    assert ledger.recover(epoch, unknown_grace=grace).empty
    clock.advance(seconds=1)
    assert ledger.recover(epoch).empty  # without a grace, for ever
    report = ledger.recover(epoch, unknown_grace=grace)
    assert (report.discarded, report.unknown, report.retired) == ([early.execution_id], [], [])
    x = execution(ledger, early)
    assert (x.status, x.outcome, x.status_reason, x.status_by, x.ended_at) == (
        "terminal",
        "interrupted",
        "grace_expired",
        "policy of 3600 s",
        clock.now,
    )
    assert execution(ledger, child).status_reason == "parent_finished"
    assert [execution(ledger, worker).status for worker in (late, adopted)] == ["unknown", "running"]
    assert ledger.recover(epoch, unknown_grace=grace).empty
    assert ledger.recover(epoch, unknown_grace=timedelta(0)).discarded == [late.execution_id]


def test_the_grace_runs_through_restarts(ledger, epoch, worker, clock):
    now = ledger.begin_epoch("the second owner")
    ledger.recover(now)
    clock.advance(minutes=50)
    now = ledger.begin_epoch("the third owner")
    assert ledger.recover(now, unknown_grace=timedelta(hours=1)).empty
    clock.advance(minutes=10)
    assert ledger.recover(now, unknown_grace=timedelta(hours=1)).discarded == [worker.execution_id]


def test_each_pass_is_recorded_with_what_it_did(ledger, epoch, worker, clock):
    child = worker.reserve()
    clock.advance(minutes=1)
    report = ledger.recover(epoch, deaths=[death(worker), death(child)])
    clock.advance(minutes=1)
    ledger.recover(epoch)
    first, second = rows(ledger, recovery_passes)
    assert (first.epoch, first.at) == (epoch, clock.now - timedelta(minutes=1))
    assert json.loads(first.report) == {
        "unknown": {"count": 1, "first": [worker.execution_id]},
        "retired": {"count": 1, "first": [child.execution_id]},
        "discarded": {"count": 0, "first": []},
        "pruned": {"count": 0, "first": []},
    }
    assert {kind["count"] for kind in json.loads(second.report).values()} == {0}
    assert report.as_json() == {
        "epoch": epoch,
        "unknown": [worker.execution_id],
        "retired": [child.execution_id],
        "discarded": [],
        "pruned": [],
    }


def test_passes_are_kept_up_to_a_bound(ledger, epoch, monkeypatch):
    monkeypatch.setattr(recovery_module, "PASSES_KEPT", 3)
    for _ in range(5):
        ledger.recover(epoch)
    kept = [found.id for found in rows(ledger, recovery_passes)]
    assert len(kept) == 3
    assert kept == list(range(kept[0], kept[0] + 3))
    ledger.recover(epoch)
    assert [found.id for found in rows(ledger, recovery_passes)] == [kept[1], kept[2], kept[2] + 1]
