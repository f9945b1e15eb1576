"""A parent may narrow the caps for what it delegates, and everything below; nobody can widen them."""

from __future__ import annotations

import pytest

from tenure.ledger import Ledger, Limits, secret_digest
from tenure.ledger.errors import InvalidParams
from tests.ledger.kit import Worker

SECRET = secret_digest("s" * 16)


@pytest.fixture
def root(ledger_url):
    with Ledger.open(ledger_url, limits=Limits(3, 3)) as ledger:
        yield Worker(ledger, ledger.begin_epoch("test")).register()


def reserve(worker: Worker, **limits: int):
    return worker.apply("child.reserve", {"secret_digest": SECRET, "limits": limits})


def test_a_parent_narrows_its_own_cap_for_one_reservation(root):
    assert not reserve(root, max_concurrent_children=1).refused
    refused = reserve(root, max_concurrent_children=1)
    assert refused.result == {"refused": "delegation_capacity", "max_concurrent_children": 1, "live_children": 1}
    assert not reserve(root, max_concurrent_children=2).refused
    assert reserve(root, max_spawn_depth=0).result["refused"] == "delegation_depth_exceeded"


def test_what_is_narrowed_holds_for_everything_below(root):
    child = root.child(reserve(root, max_concurrent_children=1, max_spawn_depth=2), "s" * 16)
    grandchild = child.reserve()
    assert reserve(child).result["max_concurrent_children"] == 1
    assert grandchild.apply("child.reserve", {"secret_digest": SECRET}).result == {
        "refused": "delegation_depth_exceeded",
        "max_spawn_depth": 2,
        "depth": 2,
    }
    assert not reserve(root).refused  # the parent itself has kept its own caps


def test_nothing_widens_what_is_configured_or_narrowed_above(root):
    child = root.child(reserve(root, max_concurrent_children=1), "s" * 16)
    assert not reserve(child, max_concurrent_children=1000, max_spawn_depth=16).refused
    assert reserve(child, max_concurrent_children=1000).result["max_concurrent_children"] == 1
    for _ in range(2):
        assert not reserve(root, max_concurrent_children=1000).refused
    assert reserve(root, max_concurrent_children=1000).result["max_concurrent_children"] == 3


@pytest.mark.parametrize(
    "limits",
    [
        {"max_spawn_depth": -1},
        {"max_spawn_depth": 17},
        {"max_concurrent_children": True},
        {"cap": 1},
        {"max_spawn_depth": "1"},
    ],
)
def test_caps_that_are_none_are_refused(root, limits):
    with pytest.raises(InvalidParams) as refused:
        reserve(root, **limits)
    assert "limits" in refused.value.detail
