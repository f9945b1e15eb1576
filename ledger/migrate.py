"""Migrations: bring a ledger to the schema this version reads."""

from __future__ import annotations

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from .errors import SchemaMismatch
from .store import Store


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", "tenure.ledger:migrations")
    config.set_main_option("path_separator", "os")
    return config


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
        SchemaMismatch: the ledger is newer than this version.
        Unavailable: the database cannot serve this now.
    """
    store = Store(url)
    try:
        at = revision(store)
        known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
        if at is not None and at not in known:
            raise SchemaMismatch(f"the ledger is at {at}, which is newer than this version of tenure; upgrade tenure")
        config = _config()
        with store.write() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
        return head()
    finally:
        store.close()


def require_head(store: Store) -> None:
    """Check that the ledger is at the schema this version reads.

    Raises:
        SchemaMismatch: it is behind, ahead, or empty.
    """
    at, wanted = revision(store), head()
    if at != wanted:
        found = f"at {at}" if at else "empty"
        raise SchemaMismatch(f"the ledger is {found}, this version needs {wanted}: run `tenure db upgrade`")
