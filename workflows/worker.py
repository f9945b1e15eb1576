"""What a Celery worker does with a workflow's message: take the hold, replay what was done, go on, finish."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from dataclasses import asdict
from typing import Any

from celery import shared_task

from ..ledger import Identity, Kind, Outcome, Status, secret_digest
from ..ledger.canonical import parse
from ..ledger.errors import (
    AdmissionConflict,
    PermissionDenied,
    RuntimeDraining,
    StaleEpoch,
    StaleGeneration,
    Unavailable,
)
from ..ledger.executions import Hold
from ..tasks.client import Client, hold_from_json
from ..tasks.orders import Order
from ..tasks.stream import Credential
from ..tasks.wire import Control
from .aio import AsyncRun
from .process import current_client
from .registry import Workflow, find
from .run import Run
from .steps import told

logger = logging.getLogger(__name__)

# An owner that is away settles nothing. Who stopped waiting would leave an execution that this live process holds and
# does not run, and that nobody may take over.
PATIENT_SECONDS = threading.TIMEOUT_MAX

_running: set[tuple[Identity, str]] = set()
_running_lock = threading.Lock()


def add_task(workflow: Workflow) -> None:
    """Make the workflow a Celery task of its name.

    It is acknowledged before it runs: the ledger, not the broker, knows what has to be run again.
    """

    def run(order: dict[str, Any]) -> str:
        return run_order(current_client(), Order.from_json(order))

    shared_task(name=workflow.name, acks_late=False, ignore_result=True)(run)


def run_order(client: Client, order: Order) -> str:
    """Run a workflow as an order says; returns what came of it, in a word.

    Raises:
        UnknownWorkflow: this process has not imported it; nothing is held.
    """
    workflow, arguments = find(order.workflow), parse(order.arguments)  # before anything is held that would not run
    mine = (client.identity, order.execution)
    with _running_lock:
        if mine in _running:
            return "running here already"
        _running.add(mine)
    try:
        run = _take(client, order)
        return "ended before" if run is None else _carry_out(workflow, run, arguments)
    except (AdmissionConflict, PermissionDenied, RuntimeDraining, StaleEpoch, StaleGeneration) as error:
        # Somebody else holds it, it was retired, or nothing new may begin: a message that came twice, or too late.
        logger.info("%s: not run here: %s", order.execution, error.explain())
        return error.detail or error.reason
    finally:
        with _running_lock:
            _running.discard(mine)


def _take(client: Client, order: Order) -> Run | None:
    """Get hold of the execution: as the first, as the child's own process, or after its process has died.

    Raises:
        AdmissionConflict: another process holds it, and is not proven dead.
        StaleEpoch, StaleGeneration: it has been retired.
    """
    secret = client.principal.derive(order.key)
    credential = Credential(order.profile, client.principal.name, client.identity, secret_digest(secret))
    body = {
        "epoch": order.epoch,
        "execution": order.execution,
        "session": order.session,
        "identity": asdict(client.identity),
        "secret": credential.secret_digest,
    }
    if order.parent:
        answer = client.ask(Control.ATTACH, body | {"generation": 1}, within=PATIENT_SECONDS)
    else:
        facts = {"kind": Kind.COMPUTE.value, "profile": order.profile}
        answer = client.ask(Control.HOLD, body | facts, within=PATIENT_SECONDS)
    hold = hold_from_json(answer)
    if hold.status is Status.TERMINAL:
        return None
    run = _open(client, hold, credential, secret)
    run.request_id = order.request
    run.recall()
    return run


def _open(client: Client, hold: Hold, credential: Credential, secret: str) -> Run:
    try:
        return Run(client, hold, credential, secret, within=PATIENT_SECONDS)
    except Unavailable:
        if hold.generation == 1:
            raise
        # The process that held it was only stopped, on this machine, and has its outbox open. What is journalled
        # there was never acknowledged, and is done anew.
        apart = copy.copy(client)
        apart.state_dir = client.state_dir / f"generation-{hold.generation}"
        return Run(apart, hold, credential, secret, within=PATIENT_SECONDS)


def _carry_out(workflow: Workflow, run: Run, arguments: dict[str, Any]) -> str:
    with run:
        try:
            result = _call(workflow, run, arguments)
            if not run.finished:
                run.finish(result=result)
        except Exception as error:
            if run.stopped is not None:
                logger.warning("%s: stopped: %s", run.execution_id, run.stopped.explain())
                return run.stopped.reason
            logger.exception("%s: workflow %s failed", run.execution_id, workflow.name)
            return _fail(run, error)
    return "completed"


def _call(workflow: Workflow, run: Run, arguments: dict[str, Any]) -> Any:
    args, kwargs = arguments["args"], arguments["kwargs"]
    if workflow.is_async:
        return asyncio.run(workflow.function(AsyncRun(run), *args, **kwargs))
    return workflow.function(run, *args, **kwargs)


def _fail(run: Run, error: Exception) -> str:
    if run.finished:
        return "completed"  # and then raised; its end stands
    run.abandon_replay()
    run.finish(outcome=Outcome.FAILED, result={"error": told(error)})
    return "failed"
