"""A handle that narrows what it delegates from here on."""

from __future__ import annotations

import pytest

from tenure.ledger import Ledger, Limits
from tenure.ledger.errors import InvalidParams
from tenure.workflows import Client, Execution, Refusal


def test_a_handle_lowers_its_caps_and_cannot_raise_them_again(sqlite_url, tmp_path):
    with (
        Ledger.open(sqlite_url, limits=Limits(3, 1)) as ledger,
        Client.direct(ledger, tmp_path) as client,
        Execution.start(client, "s") as run,
    ):
        run.narrow(max_concurrent_children=1)
        run.narrow(max_concurrent_children=3)
        child = run.reserve_child()
        assert isinstance(child, Execution)
        refused = run.reserve_child()
        assert isinstance(refused, Refusal)
        assert refused.facts == {"max_concurrent_children": 1, "live_children": 1}
        child.close()
        run.narrow(max_spawn_depth=0)
        assert run.reserve_child().reason == "delegation_depth_exceeded"
        for limits in ({"max_spawn_depth": -1}, {"cap": 1}, {"max_concurrent_children": "1"}):
            with pytest.raises(InvalidParams):
                run.narrow(**limits)
