"""Migrations: bring a ledger to the schema this version reads."""

from __future__ import annotations

import threading
from functools import cache

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import func, select
from sqlalchemy.exc import DBAPIError

from .errors import SchemaMismatch
from .store import Store

_one_at_a_time = threading.Lock()  # alembic keeps what it is doing in a global
_ADVISORY_LOCK = 0x7E4E0001  # PostgreSQL: no table is there yet to lock


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", "tenure.ledger:migrations")
    config.set_main_option("path_separator", "os")
    return config


@cache
def head() -> str:
    """Return the revision that this version reads and writes."""
    found = ScriptDirectory.from_config(_config()).get_current_head()
    assert found is not None  # the package ships its migrations
    return found


def revision(store: Store) -> str | None:
    """Return the revision a ledger is at, None for an empty database."""
    with store.read() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def upgrade(url: str) -> str:
    """Bring the ledger at `url` to the head, in one transaction; returns the revision.

    Raises:
        ConfigurationError: the URL is not usable.
        SchemaMismatch: the ledger is newer than this version, or the database holds other tables of these names.
        Unavailable: the database cannot serve this now.
    """
    store = Store(url)
    try:
        with _one_at_a_time, store.write() as connection:
            if store.dialect == "postgresql":
                connection.execute(select(func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
            _refuse_newer(MigrationContext.configure(connection).get_current_revision())
            config = _config()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
        return head()
    except DBAPIError as error:  # tables of these names that are not tenure's, most likely
        raise SchemaMismatch(f"a migration failed, nothing was changed: {error.orig}") from error
    finally:
        store.close()


def _refuse_newer(at: str | None) -> None:
    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
    if at is not None and at not in known:
        raise SchemaMismatch(f"the ledger is at {at}, which is newer than this version of tenure; upgrade tenure")


def require_head(store: Store) -> None:
    """Check that the ledger is at the schema this version reads.

    Raises:
        SchemaMismatch: it is behind, ahead, or empty.
    """
    at, wanted = revision(store), head()
    if at != wanted:
        _refuse_newer(at)
        found = f"at {at}" if at else "empty"
        raise SchemaMismatch(f"the ledger is {found}, this version needs {wanted}: run `tenure db upgrade`")
