"""What a Celery worker does with a workflow's message: take the hold, replay what was done, go on, finish."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import asdict
from typing import Any

from celery import shared_task

from ..ledger import Kind, Outcome, Status, secret_digest
from ..ledger.canonical import parse
from ..ledger.errors import AdmissionConflict, PermissionDenied, StaleEpoch, StaleGeneration
from ..tasks.client import Client, hold_from_json
from ..tasks.orders import Order
from ..tasks.stream import Credential
from ..tasks.wire import Control
from .aio import AsyncRun
from .process import current_client
from .registry import Workflow, find
from .run import Run

logger = logging.getLogger(__name__)

_running: set[str] = set()
_running_lock = threading.Lock()


def add_task(workflow: Workflow) -> None:
    """Make the workflow a Celery task of its name.

    It is acknowledged before it runs: the ledger, not the broker, knows what has to be run again.
    """

    def run(order: dict[str, Any]) -> str:
        return run_order(current_client(), Order.from_json(order))

    shared_task(name=workflow.name, acks_late=False, ignore_result=True)(run)


def run_order(client: Client, order: Order) -> str:
    """Run a workflow as an order says; returns what came of it, in a word."""
    with _running_lock:
        if order.execution in _running:
            return "running here already"
        _running.add(order.execution)
    try:
        run = _take(client, order)
        return "ended before" if run is None else _carry_out(find(order.workflow), run, parse(order.arguments))
    except (AdmissionConflict, PermissionDenied, StaleEpoch, StaleGeneration) as error:
        # Somebody else holds it, or it was retired: a message that came twice, or too late.
        logger.info("%s: not run here: %s", order.execution, error.explain())
        return error.detail or error.reason
    finally:
        with _running_lock:
            _running.discard(order.execution)


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
        hold = hold_from_json(client.ask(Control.ATTACH, body | {"generation": 1}))
    else:
        hold = hold_from_json(client.ask(Control.HOLD, body | {"kind": Kind.COMPUTE.value, "profile": order.profile}))
    if hold.status is Status.TERMINAL:
        return None
    run = Run(client, hold, credential, secret)
    run.request_id = order.request
    if hold.last_sequence:
        run.recall()
    return run


def _carry_out(workflow: Workflow, run: Run, arguments: dict[str, Any]) -> str:
    with run:
        try:
            result = _call(workflow, run, arguments)
        except (StaleEpoch, StaleGeneration, PermissionDenied) as error:
            logger.warning("%s: stopped: %s", run.execution_id, error.explain())
            return error.reason
        except Exception as error:
            logger.exception("%s: workflow %s failed", run.execution_id, workflow.name)
            return _fail(run, error)
        if not run.finished:
            run.finish(result=result)
    return "completed"


def _call(workflow: Workflow, run: Run, arguments: dict[str, Any]) -> Any:
    args, kwargs = arguments["args"], arguments["kwargs"]
    if workflow.is_async:
        return asyncio.run(workflow.function(AsyncRun(run), *args, **kwargs))
    return workflow.function(run, *args, **kwargs)


def _fail(run: Run, error: Exception) -> str:
    message = str(error).replace("\0", "").encode("utf-8", "replace").decode()[:2000]
    run.abandon_replay()
    run.finish(outcome=Outcome.FAILED, result={"error": {"type": type(error).__name__, "message": message}})
    return "failed"
