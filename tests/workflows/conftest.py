"""A ledger on each database, as the ledger's own tests have it, and a workbench."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenure.testing import Workbench
from tenure.workflows import waiting
from tests.ledger.conftest import _shared_postgres, emptied_url
from tests.workflows.bench import assert_lawful, workbench

__all__ = ["_shared_postgres", "emptied_url"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have whoever waits for a workflow look often, and nobody wait for a disk: no test here pulls a plug."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda _descriptor: None, raising=False)
    monkeypatch.setattr(waiting, "MAX_LOOK_SECONDS", 0.02)


@pytest.fixture
def migrated(_migrated_sqlite: Path) -> Path:
    """A ledger to copy."""
    return _migrated_sqlite


@pytest.fixture
def bench(tmp_path: Path, migrated: Path) -> Iterator[Workbench]:
    """A workbench; what the test leaves in its ledger must be lawful."""
    with workbench(tmp_path / "bench", migrated) as made:
        yield made
        assert_lawful(made)
