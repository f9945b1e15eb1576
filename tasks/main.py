"""The application that `celery -A tenure.tasks` finds."""

from __future__ import annotations

from collections.abc import Mapping

from celery import Celery

from ..config import Settings
from ..ledger.errors import ConfigurationError
from .application import make_app
from .attendance import attend
from .endpoints import add_endpoints
from .ownership import Tenancy, gate


def complete_app(settings: Settings) -> Celery:
    """Return an application that can be any role: owner, beat, worker, Flower.

    Raises:
        ConfigurationError: no broker is given and no embedded one runs.
    """
    app = make_app(settings)
    tenancy = Tenancy(settings)
    add_endpoints(app, settings, tenancy)
    gate(app, tenancy)
    attend(app)
    return app


def app_from_environ(environ: Mapping[str, str]) -> Celery:
    """Return the application, or end the program with one line that says which setting is wrong."""
    try:
        return complete_app(Settings.from_environ(environ))
    except ConfigurationError as error:
        # Celery shows any other exception as a traceback.
        raise SystemExit(f"tenure: {error.detail}") from None
