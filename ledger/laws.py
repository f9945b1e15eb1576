"""What is true of every ledger at every moment, as functions over a database.

Property tests, fault tests and `tenure verify` all call the same laws. Each only reads, in one snapshot, lets the
database find the rows that break it, and streams them: memory stays flat however large the ledger is.

    with ledger.read() as connection:
        for violation in audit(connection, ledger.limits):
            ...

No law compares two clock readings. An owner reads its clock before it waits for the epoch row, the next owner may be
on a machine whose clock is behind, and a clock can be set back; so a lawful ledger can hold a time that is earlier
than the one before it. Order is judged by what is counted under the lock: epochs, generations, sequences,
positions, and the ids of the history.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from sqlalchemy import (
    JSON,
    ColumnElement,
    Connection,
    MetaData,
    RowMapping,
    String,
    Subquery,
    Table,
    Text,
    and_,
    cast,
    func,
    literal,
    not_,
    or_,
    select,
    tuple_,
)

from . import schema
from .canonical import canonical, parse
from .children import MARKER, SOURCE
from .errors import InvalidParams
from .law import WIDE_ROWS, Case, Law, Rows, Violation, law, law_of_limits
from .limits import Limits
from .states import CHILD_SESSION_END, TRANSITIONS, Kind, Status

__all__ = ["LAWS", "Law", "Violation", "audit", "no_secret"]

MAX_TERMS = 100  # of one OR, which SQLite nests

_e, _h, _m, _r = schema.epochs, schema.execution_transitions, schema.messages, schema.worker_receipts
_runtime, _s, _sm, _steps = schema.runtime_epoch, schema.sessions, schema.session_models, schema.steps
_u, _x = schema.usage_records, schema.worker_executions

_parent = _x.alias("parent")
_child = _x.c.kind == Kind.CHILD
_live = _x.c.status != Status.TERMINAL
_epoch = select(_runtime.c.epoch).scalar_subquery()
# Exact for tenure's own operations: none but a refusal has such a key, and within a text its quotes are escaped.
_refused = _r.c.result.contains('"refused":"')


def _rows(table: Table, *facts: ColumnElement[Any]) -> Rows:
    """Select the primary key of a table and facts, of which some may be part of the key."""
    key = list(table.primary_key.columns)
    return select(*key, *(fact for fact in facts if all(fact is not column for column in key)))


def _span(number: ColumnElement[int], *key: ColumnElement[Any]) -> Subquery:
    """Return how many rows there are for each key, and the least and the greatest of their numbers."""
    counted = (func.count().label("rows"), func.min(number).label("first"), func.max(number).label("last"))
    return select(*key, *counted).group_by(*key).subquery("span")


def _uneven(count: ColumnElement[int], span: Subquery) -> ColumnElement[bool]:
    """Return whether the numbers are not 1 to `count`; they are different, being part of a primary key."""
    rows = func.coalesce(span.c.rows, 0)
    return or_(count != rows, func.coalesce(span.c.first, 1) != 1, func.coalesce(span.c.last, 0) != rows)


def _fences(table: Table, group: ColumnElement[Any], number: ColumnElement[int]) -> Subquery:
    """Return the fences of the receipts behind the rows of a table, beside those of the row before in the group."""
    before = [
        func.lag(fence).over(partition_by=group, order_by=number).label(f"{fence.name}_before")
        for fence in (_r.c.epoch, _r.c.generation)
    ]
    rows = _rows(table, _r.c.epoch, _r.c.generation, *before)
    if table is not _r:
        same = and_(_r.c.execution_id == table.c.execution_id, _r.c.sequence == table.c.sequence)
        rows = rows.join_from(table, _r, same)
    return rows.subquery("fences")


def _fenced(fences: Subquery) -> Rows:
    c = fences.c
    return select(fences).where(or_(c.epoch < c.epoch_before, c.generation < c.generation_before))


def _sums(*key: ColumnElement[Any]) -> Subquery:
    """Return the usage records summed up by the key."""
    counters = [func.sum(_u.c[name]).label(name) for name in schema.COUNTERS]
    return select(*key, func.count().label("records"), *counters).group_by(*key).subquery("sums")


@law
def references_hold() -> Iterator[Case]:
    """Every reference names a row that is there."""
    for table in schema.metadata.sorted_tables:
        for key in table.foreign_keys:
            target = key.column.table.alias("target")
            there = target.c[key.column.name]
            missing = and_(key.parent.is_not(None), there.is_(None))
            rows = _rows(table, key.parent).outerjoin_from(table, target, there == key.parent)
            yield Case(table, f"{key.parent.name} names no row of {key.column.table.name}", rows.where(missing))


@law
def epochs_increase() -> Iterator[Case]:
    """The epochs are 1, 2, 3 to the current one, which began when the runtime says it did."""
    count = select(literal(1).label("id"), func.count().label("rows")).select_from(_runtime)
    yield Case(_runtime, "not one row", count.having(func.count() != 1))
    before = func.coalesce(func.lag(_e.c.epoch).over(order_by=_e.c.epoch), 0).label("before")
    numbered = select(_e.c.epoch, before).subquery()
    gap = select(numbered).where(numbered.c.epoch != numbered.c.before + 1)
    yield Case(_e, "the epoch does not follow the one before", gap)
    newest = select(func.coalesce(func.max(_e.c.epoch), 0)).scalar_subquery()
    behind = _rows(_runtime, _runtime.c.epoch, newest.label("newest")).where(_runtime.c.epoch != newest)
    yield Case(_runtime, "the current epoch is not the newest", behind)
    told = _rows(_runtime, _runtime.c.began_at, _e.c.began_at.label("began"))
    told = told.outerjoin_from(_runtime, _e, _e.c.epoch == _runtime.c.epoch)
    yield Case(_runtime, "another beginning", told.where(_runtime.c.began_at.is_distinct_from(_e.c.began_at)))


@law
def older_epochs_are_settled() -> Iterator[Case]:
    """Once an epoch has been recovered, no execution of an older one can write; children of older ones have ended.

    So a live child has an `unknown` parent only where both are of the current epoch: the parent's process is proven
    dead, its own, which may be elsewhere, is not.
    """
    settled = _rows(_x, _x.c.status, _x.c.epoch, _e.c.epoch.label("recovered"))
    settled = settled.join_from(_x, _e, and_(_e.c.epoch == _epoch, _e.c.recovered_at.is_not(None)))
    writable = _x.c.status.in_([Status.REGISTERED, Status.RUNNING])
    yield Case(_x, "writable under an older epoch", settled.where(writable, _x.c.epoch < _e.c.epoch))


@law
def dense_sequences() -> Iterator[Case]:
    """The receipts of an execution are exactly 1, 2, 3 to its last sequence."""
    span = _span(_r.c.sequence, _r.c.execution_id)
    rows = _rows(_x, _x.c.last_sequence, span.c.rows, span.c.first, span.c.last)
    rows = rows.outerjoin_from(_x, span, span.c.execution_id == _x.c.execution_id)
    yield Case(_x, "its receipts are not 1 to its last sequence", rows.where(_uneven(_x.c.last_sequence, span)))


@law
def finish_is_last() -> Iterator[Case]:
    """An execution that has finished is terminal, and nothing comes after its finish."""
    rows = _rows(_r, _x.c.status, _x.c.last_sequence).join_from(_r, _x, _x.c.execution_id == _r.c.execution_id)
    rows = rows.where(_r.c.operation == "execution.finish", not_(_refused))
    goes_on = or_(_x.c.status != Status.TERMINAL, _x.c.last_sequence != _r.c.sequence)
    yield Case(_r, "not the end", rows.where(goes_on))


@law
def one_live_execution_per_session() -> Iterator[Case]:
    """At most one execution of a session has not ended."""
    live = func.count().label("live")
    rows = select(_x.c.session_id, live).where(_live).group_by(_x.c.session_id).having(func.count() > 1)
    yield Case(_s, "held more than once", rows)


@law
def writes_in_own_session_only() -> Iterator[Case]:
    """A message, usage record or step is in its execution's session, by a receipt of its operation, not a refusal.

    Only tenure's own operations write to these tables.
    """
    for table, operation in ((_m, "transcript.append"), (_u, "usage.record"), (_steps, "step.record")):
        execution, sequence, session = table.c.execution_id, table.c.sequence, table.c.session_id
        rows = _rows(table, execution, session, _x.c.session_id.label("own"))
        rows = rows.outerjoin_from(table, _x, _x.c.execution_id == execution)
        yield Case(table, "not its execution's session", rows.where(_x.c.session_id.is_distinct_from(session)))
        rows = _rows(table, execution, sequence, _r.c.operation)
        rows = rows.outerjoin_from(table, _r, and_(_r.c.execution_id == execution, _r.c.sequence == sequence))
        unlike = or_(_r.c.operation.is_distinct_from(operation), _refused)
        yield Case(table, f"no {operation} was accepted there", rows.where(unlike))


@law
def acknowledged_is_stored() -> Iterator[Case]:
    """What a receipt acknowledges is there: each of an append's messages, each usage record, each step."""
    span = _span(_m.c.position, _m.c.execution_id, _m.c.sequence)
    same = and_(span.c.execution_id == _r.c.execution_id, span.c.sequence == _r.c.sequence)
    rows = _rows(_r, span.c.rows, span.c.first, span.c.last, _r.c.result.label("_result"))
    rows = rows.outerjoin_from(_r, span, same).where(_r.c.operation == "transcript.append", not_(_refused))
    yield Case(_r, "its messages are not those it acknowledged", rows, _other_positions)
    for table, operation in ((_u, "usage.record"), (_steps, "step.record")):
        same = and_(table.c.execution_id == _r.c.execution_id, table.c.sequence == _r.c.sequence)
        rows = _rows(_r).outerjoin_from(_r, table, same).where(_r.c.operation == operation, not_(_refused))
        yield Case(_r, f"it has no row in {table.name}", rows.where(table.c.sequence.is_(None)))


def _other_positions(row: RowMapping) -> bool:
    if row["rows"] is None or row["rows"] != row["last"] - row["first"] + 1:
        return True
    return bool(row["_result"] != canonical({"positions": list(range(row["first"], row["last"] + 1))}))


@law
def counters_equal_rows() -> Iterator[Case]:
    """A session's counters are those of its rows, its messages stand at 1, 2, 3, each model's counters add up."""
    span = _span(_m.c.position, _m.c.session_id)
    rows = _rows(_s, _s.c.message_count, span.c.rows, span.c.first, span.c.last)
    rows = rows.outerjoin_from(_s, span, span.c.session_id == _s.c.session_id)
    yield Case(_s, "its messages are not 1 to its message count", rows.where(_uneven(_s.c.message_count, span)))
    used = _sums(_u.c.session_id)
    rows = _rows(_s, *_both(_s, used)).outerjoin_from(_s, used, used.c.session_id == _s.c.session_id)
    yield Case(_s, "its counters are not those of its usage records", rows.where(_differ(_s, used, schema.COUNTERS)))
    used = _sums(_u.c.session_id, _u.c.model)
    same = and_(used.c.session_id == _sm.c.session_id, used.c.model == _sm.c.model)
    rows = _rows(_sm, *_both(_sm, used)).outerjoin_from(_sm, used, same)
    differ = _differ(_sm, used, ("records", *schema.COUNTERS))
    yield Case(_sm, "its counters are not those of its usage records", rows.where(differ))
    rows = select(used.c.session_id, used.c.model, used.c.records).outerjoin_from(used, _sm, same)
    yield Case(_sm, "a model has usage records and no counters", rows.where(_sm.c.model.is_(None)))


def _both(table: Table, sums: Subquery) -> list[ColumnElement[Any]]:
    return [c for name in schema.COUNTERS for c in (table.c[name], sums.c[name].label(f"{name}_of_rows"))]


def _differ(table: Table, sums: Subquery, names: Iterable[str]) -> ColumnElement[bool]:
    return or_(*(table.c[name] != func.coalesce(sums.c[name], 0) for name in names))


@law
def receipts_follow_epochs() -> Iterator[Case]:
    """Along an execution's receipts, epoch and generation never fall; no row is ahead of what it belongs to."""
    fenced = _fenced(_fences(_r, _r.c.execution_id, _r.c.sequence))
    yield Case(_r, "an older fence than the receipt before", fenced)
    rows = _rows(_r, _r.c.epoch, _r.c.generation).join_from(_r, _x, _x.c.execution_id == _r.c.execution_id)
    ahead = or_(_r.c.epoch > _x.c.epoch, _r.c.generation > _x.c.generation)
    yield Case(_r, "ahead of its execution", rows.where(ahead))
    rows = _rows(_x, _x.c.epoch, _x.c.generation, _s.c.generation.label("of_session"))
    rows = rows.join_from(_x, _s, _s.c.session_id == _x.c.session_id)
    ahead = or_(_x.c.epoch > _epoch, _x.c.generation > _s.c.generation)
    yield Case(_x, "ahead of the ledger", rows.where(ahead))
    yield Case(_x, "live, and fenced off its session", rows.where(_live, _x.c.generation < _s.c.generation))


@law
def no_write_after_fence() -> Iterator[Case]:
    """What is written later is of no older epoch: along the ids of the history, along a transcript's positions."""
    for table in (_h, schema.recovery_passes):
        before = func.lag(table.c.epoch).over(order_by=table.c.id).label("epoch_before")
        numbered = _rows(table, table.c.epoch, before).subquery()
        late = or_(numbered.c.epoch < numbered.c.epoch_before, numbered.c.epoch > _epoch)
        yield Case(table, "not of the epoch it was written in", select(numbered).where(late))
    fenced = _fenced(_fences(_m, _m.c.session_id, _m.c.position))
    yield Case(_m, "by an older holder than the message before", fenced)


@law
def status_history() -> Iterator[Case]:
    """An execution's history is a chain of allowed moves from nothing to its status, which tells when, why, by whom."""
    before = func.lag(_h.c.to_status).over(partition_by=_h.c.execution_id, order_by=_h.c.id).label("before")
    chain = _rows(_h, _h.c.execution_id, _h.c.from_status, _h.c.to_status, before).subquery()
    torn = chain.c.from_status.is_distinct_from(chain.c.before)
    yield Case(_h, "not from where the execution stood", select(chain).where(torn))
    moves = [(str(before or ""), str(after)) for before, after in TRANSITIONS]
    known = tuple_(func.coalesce(_h.c.from_status, ""), _h.c.to_status).in_(moves)
    rows = _rows(_h, _h.c.execution_id, _h.c.from_status, _h.c.to_status)
    yield Case(_h, "no such move", rows.where(not_(known)))
    newest = select(func.max(_h.c.id).label("id")).group_by(_h.c.execution_id).subquery()
    last = select(_h).join(newest, newest.c.id == _h.c.id).subquery()
    rows = _rows(_x, _x.c.status, last.c.to_status).outerjoin_from(_x, last, last.c.execution_id == _x.c.execution_id)
    pairs = (("status", "to_status"), ("status_at", "at"), ("status_reason", "reason"), ("status_by", "by"))
    other = or_(*(_x.c[now].is_distinct_from(last.c[then]) for now, then in pairs))
    yield Case(_x, "its status is not what its history ends with", rows.where(other))


@law_of_limits
def child_cap(limits: Limits | None) -> Iterator[Case]:
    """An execution has at most as many live children as the limits allow."""
    if limits is not None:
        parent, live = _x.c.parent_execution_id, func.count()
        rows = select(parent.label("execution_id"), live.label("live_children")).where(_child, _live).group_by(parent)
        yield Case(_x, "too many live children", rows.having(live > limits.max_concurrent_children))


@law_of_limits
def depth_cap(limits: Limits | None) -> Iterator[Case]:
    """A root's depth is 0, a child's one more than its parent's; no live execution is deeper than the limits allow.

    One that has ended may be: it may have lived under other limits.
    """
    rows = _rows(_x, _x.c.depth, _parent.c.depth.label("depth_of_parent"))
    rows = rows.outerjoin_from(_x, _parent, _parent.c.execution_id == _x.c.parent_execution_id)
    yield Case(_x, "not one below its parent", rows.where(_x.c.depth != func.coalesce(_parent.c.depth + 1, 0)))
    if limits is not None:
        yield Case(_x, "too deep", _rows(_x, _x.c.depth).where(_live, _x.c.depth > limits.max_spawn_depth))


@law
def no_live_descendant_of_terminal() -> Iterator[Case]:
    """A live child's parent is live; so is its parent's, and every ancestor."""
    rows = _rows(_x, _x.c.parent_execution_id).join_from(
        _x, _parent, _parent.c.execution_id == _x.c.parent_execution_id
    )
    yield Case(_x, "outlives its parent", rows.where(_live, _parent.c.status == Status.TERMINAL))


@law
def terminal_child_session_ended() -> Iterator[Case]:
    """The session of a child that has ended has ended."""
    rows = _rows(_s, _x.c.execution_id).join_from(_s, _x, _x.c.session_id == _s.c.session_id)
    yield Case(_s, "outlives its child", rows.where(_child, not_(_live), _s.c.ended_at.is_(None)))


@law
def only_child_sessions_closed() -> Iterator[Case]:
    """A session that was closed for its child is the session of a child that has ended, or its holder's own words."""
    ended = select(_x.c.session_id).where(_child, not_(_live)).subquery()
    own_end = canonical({"ended": True, "end_reason": CHILD_SESSION_END})
    own = select(_x.c.session_id).join_from(_r, _x, _x.c.execution_id == _r.c.execution_id)
    own_words = own.where(_r.c.operation == "session.end", _r.c.result == own_end).subquery()
    rows = _rows(_s, _s.c.source).outerjoin_from(_s, ended, ended.c.session_id == _s.c.session_id)
    rows = rows.outerjoin(own_words, own_words.c.session_id == _s.c.session_id)
    neither = and_(ended.c.session_id.is_(None), own_words.c.session_id.is_(None))
    yield Case(_s, f"closed as {CHILD_SESSION_END}", rows.where(_s.c.end_reason == CHILD_SESSION_END, neither))


@law
def children_come_from_reservations() -> Iterator[Case]:
    """A child is named by the reservation it came from, and every reservation that was granted has its child.

    As a reservation names one child, no two children share one.
    """
    same = and_(_r.c.execution_id == _x.c.parent_execution_id, _r.c.sequence == _x.c.reserved_sequence)
    facts = (_x.c.parent_execution_id, _x.c.reserved_sequence, _r.c.operation)
    hidden = (_x.c.session_id.label("_session"), _x.c.depth.label("_depth"), _r.c.result.label("_result"))
    rows = _rows(_x, *facts, *hidden).outerjoin_from(_x, _r, same)
    yield Case(_x, "no reservation names it", rows.where(_child), _not_reserved)
    rows = _rows(_r).outerjoin_from(_r, _x, same).where(_r.c.operation == "child.reserve", not_(_refused))
    yield Case(_r, "its child is missing", rows.where(_x.c.execution_id.is_(None)))


def _not_reserved(row: RowMapping) -> bool:
    given = _object(row["_result"])
    names = given.get("execution_id"), given.get("session_id"), given.get("depth")
    mine = row["execution_id"], row["_session"], row["_depth"]
    return bool(row["operation"] != "child.reserve" or "refused" in given or names != mine)


@law
def delegation_marker() -> Iterator[Case]:
    """A child's session says whom it was made for, and has its parent's profile."""
    rows = _rows(_s, _x.c.execution_id, _s.c.source, _s.c.parent_session_id, _s.c.profile)
    hidden = (
        _s.c.model_config.label("_config"),
        _parent.c.session_id.label("_origin"),
        _parent.c.profile.label("_profile"),
    )
    rows = rows.add_columns(*hidden).join_from(_s, _x, _x.c.session_id == _s.c.session_id)
    rows = rows.join(_parent, _parent.c.execution_id == _x.c.parent_execution_id)
    yield Case(_s, "not marked as its parent's", rows, _unmarked, WIDE_ROWS)


def _unmarked(row: RowMapping) -> bool:
    found = row["source"], row["parent_session_id"], row["profile"], _object(row["_config"]).get(MARKER)
    return found != (SOURCE, row["_origin"], row["_profile"], row["_origin"])


def _object(text: str | None) -> dict[str, Any]:
    try:
        value = parse(text or "")
    except InvalidParams:  # another law's finding
        return {}
    return value if isinstance(value, dict) else {}


_OBJECTS = (_r.c.result, _m.c.body, _s.c.model_config, schema.recovery_passes.c.report)
_VALUES = (_x.c.result, _steps.c.result)


@law
def canonical_json() -> Iterator[Case]:
    """Every stored JSON text is the canonical form of its value, and an object where it has to be one."""
    for columns, broken in ((_OBJECTS, _no_object), (_VALUES, _not_canonical)):
        for column in columns:
            rows = _rows(column.table, column.label("_text")).where(column.is_not(None))
            yield Case(column.table, f"{column.name} is not canonical", rows, broken, WIDE_ROWS)


def _not_canonical(row: RowMapping) -> bool:
    try:
        return bool(canonical(parse(row["_text"])) != row["_text"])
    except InvalidParams:
        return True


def _no_object(row: RowMapping) -> bool:
    return row["_text"][:1] != "{" or _not_canonical(row)


LAWS: tuple[Law, ...] = (
    references_hold,
    epochs_increase,
    older_epochs_are_settled,
    dense_sequences,
    finish_is_last,
    one_live_execution_per_session,
    writes_in_own_session_only,
    acknowledged_is_stored,
    counters_equal_rows,
    receipts_follow_epochs,
    no_write_after_fence,
    status_history,
    child_cap,
    depth_cap,
    no_live_descendant_of_terminal,
    terminal_child_session_ended,
    only_child_sessions_closed,
    children_come_from_reservations,
    delegation_marker,
    canonical_json,
)


def audit(connection: Connection, limits: Limits | None = None, laws: Iterable[Law] = LAWS) -> Iterator[Violation]:
    """Yield every violation of the laws, law by law.

    Raises:
        DBAPIError: the database cannot be read; within `Ledger.read()` that is `Unavailable`.
    """
    for each in laws:
        yield from each(connection, limits)


def no_secret(needles: Iterable[str]) -> Law:
    """Return the law that no text in the database, tables of an application included, holds one of the needles.

    What it finds is told by row and column, never by the needle.

    Raises:
        InvalidParams: a needle is empty.
    """
    forms = sorted({form for needle in needles for form in _forms(needle)})

    def cases(connection: Connection, _limits: Limits | None) -> Iterator[Case]:
        """No text in the database holds a secret."""
        found = MetaData()
        found.reflect(connection)
        for column in (c for table in found.tables.values() for c in table.columns):
            if isinstance(column.type, (String, JSON)):
                text = cast(column, Text)
                for start in range(0, len(forms), MAX_TERMS):
                    some = forms[start : start + MAX_TERMS]
                    holds = or_(*(func.replace(text, form, "") != text for form in some))
                    yield Case(column.table, f"{column.name} holds a secret", _rows(column.table).where(holds))

    return Law("no_secret", cases.__doc__ or "", cases)


def _forms(needle: str) -> set[str]:
    """Return the needle as it stands in plain text and within a JSON string."""
    if not needle:
        raise InvalidParams("needles: an empty text is in every text")
    return {needle, json.dumps(needle)[1:-1], json.dumps(needle, ensure_ascii=False)[1:-1]}
