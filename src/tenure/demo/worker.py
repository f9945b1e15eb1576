"""What the workers of the demonstration run: a parent that plays a recorded run and delegates, and its children."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery import Task, shared_task

from tenure.config import Settings
from tenure.ledger.errors import TenureError
from tenure.tasks.wire import Answer
from tenure.workflows import Child, Client, Execution, Outcome, Refusal, Status

from .stage import Plan, Stage, wait_for
from .trajectory import load

CHILDREN = 2


@contextmanager
def _client(lose: int = 0) -> Iterator[tuple[Client, Stage]]:
    """Connect; with `lose`, the first receipt of that sequence never arrives."""
    settings = Settings.from_environ(os.environ)
    stage = Stage(settings.state_dir)
    lost = {"left": 1 if lose else 0}

    def intercept(answers: list[Answer]) -> list[Answer]:
        hit = [a for a in answers if a.sequence == lose and a.error is None and a.request]
        if lost["left"] and hit:
            lost["left"] -= 1
            stage.tell("parent", "lost", f"the acknowledgement of operation {lose} is lost on its way")
            return [a for a in answers if a not in hit]
        if hit:
            stage.tell("parent", "replayed", f"operation {lose} was sent again and answered by its receipt")
        return answers

    with Client.connect(settings, intercept=intercept if lose else None) as client:
        yield client, stage


@shared_task(bind=True, name="tenure.demo.parent", acks_late=False)
def parent(task: Task[Any, Any], session: str, plan: dict[str, Any]) -> None:
    """Play the parent's run, with two children beside it, whatever happens to the owner."""
    script = Plan(**plan)
    messages = load(Path(script.parent))
    # session.create and two reservations and a refusal come before the first append
    with _client(lose=script.lost_receipt + 4) as (client, stage), Execution.start(client, session) as run:
        run.create_session(source="demo", model="recorded")
        _delegate_all(task, run, stage, script, range(CHILDREN))
        refused = run.reserve_child()
        assert isinstance(refused, Refusal)  # the cap is two
        stage.tell("parent", "refused", f"a third child is refused: {refused.reason}, {refused.facts}")
        for message in messages[: script.halfway]:
            _play(run, message, script)
        stage.tell("parent", "halfway", f"played {script.halfway} of {len(messages)} messages")
        wait_for(lambda: stage.has("killed"), "the owner's end")
        before = run.epoch
        for message in messages[script.halfway :]:
            _play(run, message, script)
        stage.tell("parent", "adopted", f"went on by itself under epoch {run.epoch}, after epoch {before}")
        _see_it_through(task, run, stage, script)
        retired = run.finish(result={"messages": len(messages)})
        stage.tell("parent", "finished", f"played all {len(messages)} messages; {len(retired)} children left")


def _see_it_through(task: Task[Any, Any], run: Execution, stage: Stage, script: Plan) -> None:
    """Delegate again what the old epoch took along, and wait until every child has completed."""
    again = [child for child in run.children() if child.status is Status.TERMINAL and child.reason != "finished"]
    for child in again:
        stage.tell("parent", "retired", f"child {child.execution_id[:8]} was retired: {child.reason}")
    _delegate_all(task, run, stage, script, range(CHILDREN, CHILDREN + len(again)))
    wait_for(lambda: _completed(run.children()) == CHILDREN, "the children's end")
    stage.tell("parent", "gathered", f"{CHILDREN} children have completed")


def _completed(children: list[Child]) -> int:
    return sum(child.outcome is Outcome.COMPLETED for child in children)


def _delegate_all(task: Task[Any, Any], run: Execution, stage: Stage, script: Plan, numbers: range) -> None:
    for number in numbers:
        child = run.reserve_child()
        if isinstance(child, Refusal):
            raise TypeError(f"child {number} refused: {child.reason}")
        name = f"child {number + 1}"
        stage.tell("parent", "delegated", f"{name} is {child.execution_id[:8]}")
        arguments = {"name": name, "ticket": child.ticket(), "plan": script.to_json(), "number": number}
        task.app.send_task("tenure.demo.child", kwargs=arguments, kwargsrepr=f"<{name}>", ignore_result=True)


@shared_task(name="tenure.demo.child", acks_late=False)
def child(name: str, ticket: str, plan: dict[str, Any], number: int) -> None:
    """Play a child's run. One of the first two waits in mid-run until the owner has been killed."""
    script = Plan(**plan | {"child_halfway": tuple(plan["child_halfway"])})
    messages = load(Path(script.child))
    pause_at = script.child_halfway[number] if number < CHILDREN else None
    with _client() as (client, stage):
        try:
            with Execution.attach(client, ticket) as run:
                stage.tell(name, "attached", f"runs in process {os.getpid()}")
                run.create_session(source="ignored", model="recorded", model_config={"max_iterations": 7})
                for index, message in enumerate(messages):
                    if index == pause_at:
                        stage.tell(name, "halfway", f"played {index} of {len(messages)} messages")
                        wait_for(lambda: stage.has("killed"), "the owner's end")
                    _play(run, message, script)
                run.finish(result={"messages": len(messages)})
                stage.tell(name, "finished", f"played all {len(messages)} messages")
        except TenureError as error:
            stage.tell(name, "stopped", f"can write no more: {error.explain()}")


def _play(run: Execution, message: dict[str, Any], script: Plan) -> None:
    time.sleep(script.thinking)  # the time a model takes; nothing waits for it
    run.append([message])
