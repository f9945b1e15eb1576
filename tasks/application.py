"""The Celery application: queues, settings and beat's schedule, for owners and workers alike.

Every role that shares a Redis database must have the same visibility timeout: any worker sweeps the whole
unacknowledged set of that database by its own value. So there is one application, and one place for its settings.
"""

from __future__ import annotations

from typing import Any

from celery import Celery
from kombu import Exchange, Queue

from ..config import Settings
from ..ledger.errors import ConfigurationError
from .broker import embedded_url

APPLY = "tenure.apply"
CONTROL = "tenure.control"
RECOVER = "tenure.recover"
CANARY = "tenure.canary"


def make_app(settings: Settings) -> Celery:
    """Return the application for these settings.

    Raises:
        ConfigurationError: no broker is given and no embedded one runs.
    """
    app = Celery("tenure", set_as_current=False)
    url = broker_url(settings)
    app.conf.update(
        broker_url=url,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_channel_error_retry=True,
        broker_connection_timeout=4,
        broker_heartbeat=30,
        broker_pool_limit=10,  # four starve Flower
        broker_pool_acquire_timeout=10,
        broker_transport_options=transport_options(url, settings),
        task_queues=[_owner_queue(settings, url), Queue(settings.work_queue, Exchange(settings.work_queue))],
        task_default_queue=settings.work_queue,
        task_default_exchange=settings.work_queue,
        task_default_routing_key=settings.work_queue,
        task_create_missing_queues=False,
        task_routes={name: {"queue": settings.owner_queue} for name in (APPLY, CONTROL, RECOVER, CANARY)},
        task_acks_late=True,
        task_reject_on_worker_lost=False,
        task_ignore_result=True,
        task_store_errors_even_if_ignored=False,
        task_publish_retry=False,
        task_serializer="json",
        accept_content=["json"],
        result_accept_content=["json"],
        task_send_sent_event=True,
        worker_prefetch_multiplier=1,
        # An order fetched behind a workflow would wait for its end while another worker has nothing to do.
        worker_disable_prefetch=not url.startswith("amqp"),  # Celery can do this on Redis only
        worker_send_task_events=True,
        worker_hijack_root_logger=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_soft_shutdown_timeout=0,
        worker_enable_prefetch_count_reduction=False,
        worker_deduplicate_successful_tasks=False,
        enable_utc=True,
        timezone="UTC",
        beat_max_loop_interval=5,
        beat_enable_remote_control=True,
        beat_schedule=_schedule(settings),
        imports=settings.imports,
    )
    return app


def broker_url(settings: Settings) -> str:
    """Return the broker's URL, given or embedded.

    Raises:
        ConfigurationError: there is neither.
    """
    url = settings.broker_url or embedded_url(settings.state_dir)
    if url is None:
        raise ConfigurationError(
            f"no broker: TENURE_BROKER_URL is not set and no embedded broker runs in {settings.state_dir};"
            " set the variable, or start `tenure up` first"
        )
    return url


def transport_options(url: str, settings: Settings) -> dict[str, Any]:
    """Return the transport's options: nothing a broker does may block a process for ever."""
    if url.startswith("amqp"):
        retry = {"max_retries": 1, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.5}
        return {"confirm_publish": True, "read_timeout": 30, "write_timeout": 10} | retry
    return {
        "visibility_timeout": settings.visibility_seconds,
        "unacked_restore_interval": 5,
        "unacked_restore_throttle": 1,
        "socket_timeout": 10,
        "socket_connect_timeout": 3,
        "socket_keepalive": True,
        "health_check_interval": 25,
        "retry_on_timeout": True,
        "global_keyprefix": "tenure:",
    }


def _owner_queue(settings: Settings, url: str) -> Queue:
    """On RabbitMQ, replicated and with one active consumer: a help, never the fence."""
    name = settings.owner_queue
    arguments = {"x-queue-type": "quorum", "x-single-active-consumer": True} if url.startswith("amqp") else None
    return Queue(name, Exchange(name), routing_key=name, queue_arguments=arguments)


def _schedule(settings: Settings) -> dict[str, Any]:
    # A recovery that nobody ran before the next is due is worth nothing: it expires instead of piling up.
    options = {"queue": settings.owner_queue, "expires": settings.recovery_seconds, "ignore_result": True}
    return {"recovery": {"task": RECOVER, "schedule": settings.recovery_seconds, "options": options}}
