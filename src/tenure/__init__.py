"""tenure: durable, owned and bounded work on a Celery fleet."""
