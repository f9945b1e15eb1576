"""tenure's own operations."""

from __future__ import annotations

from typing import Any

from sqlalchemy import update

from .. import children, executions, schema, submissions
from ..canonical import canonical, parse
from ..limits import Limits
from ..states import CHILD_SESSION_END, Kind, Reason
from .payloads import (
    ChildReserve,
    ExecutionFinish,
    Message,
    SessionCreate,
    SessionEnd,
    StepRecord,
    TranscriptAppend,
    UsageRecord,
)
from .registry import Operation, operation
from .work import Refusal, Result, Work


@operation("session.create")
def session_create(work: Work, payload: SessionCreate) -> Result:
    """Set the session's constructor facts; a child's own facts are merged beside the owner's marker."""
    session = work.session
    config = dict(payload.model_config or {})
    if work.execution.kind is Kind.CHILD:
        before = parse(session.model_config or "{}")
        config = before | config | {children.MARKER: before[children.MARKER]}
    else:
        session.source = payload.source
    session.model = payload.model
    session.model_config = canonical(config)
    session.system_prompt = payload.system_prompt
    work.touch()
    return {"session_id": session.session_id}


@operation("transcript.append")
def transcript_append(work: Work, payload: TranscriptAppend) -> Result | Refusal:
    """Append messages and return their positions, counted from 1."""
    session = work.session
    if session.ended_at is not None:
        return Refusal("session_ended", {"end_reason": session.end_reason})
    first = session.message_count + 1
    for position, message in enumerate(payload.messages, first):
        work.insert(
            schema.messages,
            session_id=session.session_id,
            position=position,
            execution_id=work.execution.execution_id,
            sequence=work.sequence,
            role=message.role,
            body=_body(message),
            created_at=work.now,
        )
    session.message_count += len(payload.messages)
    return {"positions": list(range(first, session.message_count + 1))}


def _body(message: Message) -> str:
    given = {name: getattr(message, name) for name in message.__struct_fields__}
    return canonical({name: value for name, value in given.items() if value is not None})


@operation("usage.record")
def usage_record(work: Work, payload: UsageRecord) -> Result:
    """Add to the session's and the model's counters."""
    amounts = {name: getattr(payload, name) for name in schema.COUNTERS if name != "cost_nanos"}
    amounts["cost_nanos"] = round(payload.cost * 1e9)
    for name, amount in amounts.items():
        setattr(work.session, name, getattr(work.session, name) + amount)
    _add_to_model(work, payload.model, amounts)
    work.insert(
        schema.usage_records,
        execution_id=work.execution.execution_id,
        sequence=work.sequence,
        session_id=work.session.session_id,
        model=payload.model,
        task=payload.task,
        created_at=work.now,
        **amounts,
    )
    return {"recorded": True}


def _add_to_model(work: Work, model: str, amounts: dict[str, int]) -> None:
    t = schema.session_models
    sums: dict[str, Any] = {name: t.c[name] + amount for name, amount in amounts.items()}
    changed = work.execute(
        update(t)
        .where(t.c.session_id == work.session.session_id, t.c.model == model)
        .values(records=t.c.records + 1, **sums)
    )
    if changed.rowcount == 0:
        work.insert(t, session_id=work.session.session_id, model=model, records=1, **amounts)


@operation("step.record")
def step_record(work: Work, payload: StepRecord) -> Result:
    """Keep a step's result, to be read back when the workflow runs again."""
    work.insert(
        schema.steps,
        execution_id=work.execution.execution_id,
        sequence=work.sequence,
        session_id=work.session.session_id,
        name=payload.name,
        input_digest=payload.input_digest,
        result=canonical(payload.result),
        created_at=work.now,
    )
    return {"recorded": True}


@operation("child.reserve")
def child_reserve(work: Work, payload: ChildReserve) -> Result | Refusal:
    """Mint a child, or refuse: a drain first, then depth, then the cap."""
    # A workflow that runs again tells its reservations apart by the label.
    label = {} if payload.work is None else {"label": payload.work.label}
    asked = payload.limits
    narrowed = None if asked is None else Limits(asked.max_concurrent_children, asked.max_spawn_depth)
    limits = children.limits_of(work.tx, work.execution, narrowed)
    if refused := children.refusal(work.tx, work.execution, limits):
        return Refusal(refused.pop("refused"), refused | label)
    child = children.mint(work.tx, work.execution, work.sequence, payload.secret_digest, limits)
    if payload.work is not None:
        submissions.add_child(work.tx, child, payload.work)
    work.touch()
    told = {"execution_id": child.execution_id, "session_id": child.session_id}
    return told | {"generation": child.generation, "depth": child.depth} | label


@operation("session.end")
def session_end(work: Work, payload: SessionEnd) -> Result:
    """End the session; the first to end it wins."""
    session = work.session
    ended = session.ended_at is None
    if ended:
        session.ended_at, session.end_reason = work.now, payload.end_reason
        work.touch()
    return {"ended": ended, "end_reason": session.end_reason}


@operation("execution.finish")
def execution_finish(work: Work, payload: ExecutionFinish) -> Result:
    """End the execution, every live descendant, and, where it is a child, its session."""
    execution, session = work.execution, work.session
    execution.result = canonical(payload.result)
    if execution.kind is Kind.CHILD and session.ended_at is None:
        session.ended_at, session.end_reason = work.now, CHILD_SESSION_END
        work.touch()
    retired = executions.end(
        work.tx, execution, outcome=payload.outcome, reason=Reason.FINISHED, by=execution.execution_id
    )
    return {"outcome": payload.outcome.value, "retired": sorted(retired)}


BUILTIN: tuple[Operation[Any], ...] = (
    session_create,
    transcript_append,
    usage_record,
    step_record,
    child_reserve,
    session_end,
    execution_finish,
)
