"""The measurement of takeovers runs, and finds nothing done twice and nothing written by a zombie."""

from __future__ import annotations

import logging

from tests.bench.takeover import deployed, measure

logger = logging.getLogger(__name__)


def test_another_process_goes_on_where_one_was_killed_or_stopped(tmp_path, postgres_url, redis_url):
    with deployed(tmp_path, postgres_url, redis_url) as deployment:
        figures = measure(deployment, 1, logger.info)
    assert figures["sigkill"]["duplicate_steps"] == 0
    assert figures["sigstop"]["zombie_writes"] == 0
    # Far above what is usual: seen through the kernel it takes parts of a second, through a lease that runs out longer.
    assert figures["sigkill"]["worst_s"] < 10
    assert figures["sigstop"]["median_s"] < 15
