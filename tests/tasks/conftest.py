"""A ledger on each database, as the ledger's own tests have it."""

from tests.ledger.conftest import _shared_postgres, emptied_url

__all__ = ["_shared_postgres", "emptied_url"]
