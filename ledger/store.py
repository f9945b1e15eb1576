"""Connections and transactions on SQLite and PostgreSQL.

Two things a database driver does not do by itself are done here: on SQLite every write transaction
starts with BEGIN IMMEDIATE (SQLAlchemy begins nothing for a SELECT, and a deferred transaction that turns
into a writing one fails at once, whatever the patience), and an error that the database may not have
tomorrow is told apart from one that the statement always will.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, extract, func, select
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError, TimeoutError  # noqa: A004 (the pool's)

from .errors import ConfigurationError, Unavailable

PATIENCE_SECONDS = 20.0  # how long a statement waits for a database that is busy
_STATEMENT_FAULTS = {  # SQLite reports a wrong statement as operational too
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_MISUSE,
    sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_RANGE,
}
_PROGRAM_LIMIT = "54"  # class of SQLSTATE: PostgreSQL reports what no patience changes as operational too
_READ_ONLY = "25006"  # and a standby, which may be a primary tomorrow, as internal
_PG_OPTIONS = (
    f"-c lock_timeout={int(PATIENCE_SECONDS * 1000)} -c statement_timeout={int(PATIENCE_SECONDS * 3000)}"
    " -c idle_in_transaction_session_timeout=15000"
)


def parse_url(url: str) -> URL:
    """Return the URL with the driver that tenure uses.

    Raises:
        ConfigurationError: it is neither a SQLite file nor a PostgreSQL database.
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ConfigurationError("ledger URL: not a database URL; give sqlite:///FILE or postgresql://...") from None
    match parsed.get_backend_name():
        case "sqlite" if parsed.database and parsed.database != ":memory:":
            return parsed.set(drivername="sqlite")
        case "postgresql":
            return parsed.set(drivername="postgresql+psycopg")
        case _:
            shown = parsed.render_as_string(hide_password=True)
            raise ConfigurationError(f"ledger URL: {shown} given; sqlite:///FILE or postgresql://... is allowed")


def unavailable(error: DBAPIError) -> Unavailable | None:
    """Return what to raise for a fault of the database itself, None for a fault of the statement."""
    original = error.orig
    if isinstance(original, sqlite3.Error):
        code = getattr(original, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        if code & 0xFF in _STATEMENT_FAULTS:
            return None
        name = getattr(original, "sqlite_errorname", type(original).__name__)
        return Unavailable(f"SQLite: {original} ({name})")
    state = getattr(original, "sqlstate", None)
    if error.connection_invalidated or _of_the_server(error, state):
        first_line = str(original).strip().partition("\n")[0]
        return Unavailable(f"PostgreSQL: {first_line} ({state or type(original).__name__})")
    return None


def _of_the_server(error: DBAPIError, state: str | None) -> bool:
    if state is None:  # the driver's own: about the connection, unless there is a statement that it will not send
        return isinstance(error, (OperationalError, InterfaceError)) and error.statement is None
    return state == _READ_ONLY or (isinstance(error, OperationalError) and not state.startswith(_PROGRAM_LIMIT))


class Store:
    """One database: how to open a reading and a writing transaction on it."""

    def __init__(self, url: str) -> None:
        self.url = parse_url(url)
        self.dialect = self.url.get_backend_name()
        if self.dialect == "sqlite":
            self._check_file()
            self.engine = _sqlite_engine(self.url)
        else:
            # Connections are few and long; a broken one is noticed when it is taken, not in mid-transaction.
            self.engine = create_engine(
                self.url,
                pool_size=4,
                pool_pre_ping=True,
                hide_parameters=True,
                connect_args={"options": _PG_OPTIONS, "connect_timeout": 10},
            )

    def _check_file(self) -> None:
        path = Path(str(self.url.database))
        try:
            if path.exists() and not path.is_file():
                raise ConfigurationError(f"ledger URL: {path} is not a file")
            if not path.parent.is_dir():
                raise ConfigurationError(f"ledger URL: the folder {path.parent} does not exist")
        except OSError as error:
            raise ConfigurationError(f"ledger URL: {path}: {error.strerror}") from error

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Run one writing transaction; it commits at the end, or not at all.

        Raises:
            Unavailable: the database cannot serve this now. If it was the commit that failed, whether it took
                effect is unknown until the receipt is read again.
        """
        with _translated(), self.engine.execution_options(tenure_begin="IMMEDIATE").begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Run one reading transaction: a single snapshot of the ledger.

        Raises:
            Unavailable: the database cannot serve this now.
        """
        options: dict[str, Any] = {} if self.dialect == "sqlite" else {"isolation_level": "REPEATABLE READ"}
        with _translated(), self.engine.execution_options(**options).begin() as connection:
            yield connection

    def close(self) -> None:
        """Give every connection back to the system."""
        self.engine.dispose()


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise Unavailable("every connection of this process' pool is in use") from error
    except DBAPIError as error:
        told = unavailable(error)
        if told is None:
            raise
        raise told from error


def _sqlite_engine(url: URL) -> Engine:
    engine = create_engine(url, hide_parameters=True, connect_args={"timeout": PATIENCE_SECONDS})

    @event.listens_for(engine, "connect")
    def connect(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # the driver begins nothing; `begin` below does
        cursor = connection.cursor()
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        mode = connection.get_execution_options().get("tenure_begin", "DEFERRED")
        connection.exec_driver_sql(f"BEGIN {mode}")

    return engine


def database_seconds(connection: Connection) -> float:
    """Return the database's own clock, in seconds since 1970."""
    if connection.dialect.name == "sqlite":
        clock = (func.julianday("now") - 2440587.5) * 86400.0
    else:
        clock = extract("epoch", func.clock_timestamp())
    return float(connection.execute(select(clock)).scalar_one())
