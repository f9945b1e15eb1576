"""Celery's side of tenure: the application, the owner of the owner queue, and the client side that workers use.

    celery -A tenure.tasks worker -Q owner
    celery -A tenure.tasks beat

`app` is made from the environment when it is first asked for.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery import Celery

    app: Celery

__all__ = ["app"]


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .main import app_from_environ  # noqa: PLC0415 (importing the package must not need an environment)

    globals()["app"] = made = app_from_environ(os.environ)
    return made
