"""Operations: what a worker can have done to the ledger, each a payload type and a handler.

An application adds its own and names them in its package's metadata:

    @operation("invoice.add")
    def add(work: Work, payload: Invoice) -> dict[str, JSON]: ...

    [project.entry-points."tenure.operations"]
    invoice = "shop.ledger:add"
"""

from .builtin import BUILTIN
from .registry import Operation, Registry, operation
from .work import Refusal, Result, Work

__all__ = ["BUILTIN", "Operation", "Refusal", "Registry", "Result", "Work", "operation"]
