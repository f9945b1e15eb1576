"""The error tree: one reason each, and every error survives each way an error can travel."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from typing import Any

import pytest
from celery import Celery
from celery.backends.base import Backend

from tenure.ledger import errors
from tenure.ledger.errors import Action, OwnerSuperseded, StaleEpoch, TenureError, from_wire, to_wire
from tenure.workflows import errors as workflow_errors


def tree(base: type[TenureError]) -> list[type[TenureError]]:
    return [base, *(found for sub in base.__subclasses__() for found in tree(sub))]


TREE = sorted(tree(TenureError), key=lambda cls: cls.__name__)
DATA: dict[str, Any] = {"expected": 7, "nested": {"list": [1, None, "\u20ac"]}}


def same(one: TenureError, two: Any) -> bool:
    return type(one) is type(two) and (one.detail, one.data, one.args) == (two.detail, two.data, two.args)


@pytest.fixture
def backend() -> Backend:
    app = Celery("test", set_as_current=False)
    app.conf.result_serializer = "json"
    return Backend(app=app)


def test_the_tree_is_all_of_the_modules():
    named = [*vars(errors).values(), *vars(workflow_errors).values()]
    public = {found for found in named if isinstance(found, type) and issubclass(found, Exception)}
    assert set(TREE) == public
    assert len(TREE) > 10


@pytest.mark.parametrize("cls", TREE)
def test_str_is_the_reason_and_nothing_else(cls):
    error = cls("the detail", DATA)
    assert str(error) == error.reason == cls.reason
    assert error.reason.replace("_", "").islower()
    assert error.explain() == f"{cls.reason}: the detail"
    assert (cls().explain(), cls().detail, cls().data) == (cls.reason, "", {})
    assert repr(error) == f"{cls.__name__}('the detail', {DATA!r})"
    assert isinstance(cls.action, Action)
    assert cls.__doc__


@pytest.mark.parametrize("cls", TREE)
@pytest.mark.parametrize("args", [(), ("the detail",), ("the detail", DATA)])
def test_an_error_survives_pickle_and_copy(cls, args):
    error = cls(*args)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert same(error, pickle.loads(pickle.dumps(error, protocol)))
    assert same(error, copy.copy(error))
    assert same(error, copy.deepcopy(error))


@pytest.mark.parametrize("cls", TREE)
@pytest.mark.parametrize("args", [(), ("the detail",), ("the detail", DATA)])
def test_an_error_survives_celerys_json(cls, args, backend):
    error = cls(*args)
    stored = backend.encode(backend.prepare_exception(error, "json"))
    assert isinstance(stored, str)
    assert cls.__module__ in sys.modules
    assert same(error, backend.exception_to_python(backend.decode(stored)))


@pytest.mark.parametrize("cls", TREE)
def test_an_error_survives_the_wire(cls):
    error = cls("the detail", DATA)
    back = from_wire(json.loads(json.dumps(to_wire(error))))
    expected = StaleEpoch if cls is OwnerSuperseded else cls  # the owner's own affair
    assert type(back) is expected
    assert (back.detail, back.data, back.action) == (error.detail, error.data, error.action)


def test_reasons_are_told_apart():
    reasons = [cls.reason for cls in TREE if cls is not OwnerSuperseded]
    assert len(set(reasons)) == len(reasons)
    assert issubclass(OwnerSuperseded, StaleEpoch)


def test_what_a_newer_owner_says_is_still_an_error():
    back = from_wire({"reason": "not_invented_yet", "detail": "d", "data": {"a": 1}})
    assert (type(back), back.detail, back.data) == (TenureError, "d", {"a": 1})
    assert type(from_wire({"reason": "unavailable"})) is errors.Unavailable


@pytest.mark.parametrize(
    ("reason", "action"),
    [
        ("stale_epoch", "adopt"),
        ("sequence_gap", "resend"),
        ("unavailable", "later"),
        ("runtime_draining", "later"),
        ("outbox_full", "later"),
        *(
            (reason, "never")
            for reason in (
                "invalid_params",
                "not_found",
                "permission_denied",
                "stale_generation",
                "admission_conflict",
                "schema_mismatch",
                "configuration",
            )
        ),
    ],
)
def test_each_reason_says_what_its_sender_should_do(reason, action):
    assert from_wire({"reason": reason}).action == action
