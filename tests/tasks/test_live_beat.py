"""Beat has the owner recover on a schedule, once or more than once; a worker that died is noticed."""

from __future__ import annotations

from tests.services import wait_until
from tests.tasks.live import START_SECONDS, Fleet, kill, says


def passes(fleet: Fleet) -> int:
    return int(fleet.value("SELECT count(*) FROM recovery_passes"))


def times_lost(fleet: Fleet, execution: str) -> int:
    statement = "SELECT count(*) FROM execution_transitions WHERE execution_id = :execution AND to_status = 'unknown'"
    return int(fleet.value(statement, execution=execution))


def await_passes(fleet: Fleet, count: int) -> None:
    goal = passes(fleet) + count
    wait_until(lambda: passes(fleet) >= goal, within=30, what=f"{count} more passes of recovery")


def test_two_beats_recover_what_the_dead_left_once_and_leave_the_living_alone(spawn, tmp_path, sqlite_url, redis_url):
    fleet = Fleet(spawn, tmp_path, ledger=sqlite_url, broker=redis_url, recovery_seconds=1)
    fleet.owner()
    beats = [fleet.beat(), fleet.beat()]
    for beat in beats:
        beat.says("Sending due task recovery", within=START_SECONDS)
    lost, kept = fleet.holder("lost"), fleet.holder("kept")
    with fleet.run() as run:
        says(run, "before")
        lost.kill()
        wait_until(lambda: fleet.status(lost.execution)[0] == "unknown", within=20, what="its death is noticed")
        await_passes(fleet, 3)
        assert fleet.status(lost.execution) == ("unknown", "process_dead")
        assert fleet.status(lost.child) == ("terminal", "process_dead")
        ended = "SELECT end_reason FROM sessions WHERE session_id = :session AND ended_at IS NOT NULL"
        assert fleet.value(ended, session=lost.child_session) == "agent_close"
        assert fleet.transcript("lost") == ["hello"]
        assert times_lost(fleet, lost.execution) == 1
        for execution in (kept.execution, kept.child, run.execution_id):
            assert fleet.status(execution)[0] == "running"
        run.finish()
    assert all(beat.running for beat in beats)
    fleet.assert_lawful()


def test_two_beats_recover_an_epoch_once(spawn, tmp_path, postgres_url, redis_url):
    fleet = Fleet(spawn, tmp_path, ledger=postgres_url, broker=redis_url, recovery_seconds=1)
    first = fleet.owner()
    fleet.beat()
    fleet.beat()
    kept = fleet.holder("kept")
    with fleet.run() as run:
        says(run, "before")
        kill(first)
        fleet.owner()
        await_passes(fleet, 4)
        assert fleet.status(run.execution_id) == ("unknown", "owner_restarted")
        assert fleet.status(kept.child) == ("terminal", "owner_restarted")
        assert times_lost(fleet, run.execution_id) == times_lost(fleet, kept.execution) == 1
        says(run, "after")
        await_passes(fleet, 2)
        assert fleet.status(run.execution_id)[0] == "running"
        assert times_lost(fleet, run.execution_id) == 1
        run.finish()
    assert fleet.transcript() == ["before", "after"]
    fleet.assert_lawful()
