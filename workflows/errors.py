"""What can go wrong in a workflow, each its own error."""

from __future__ import annotations

from ..ledger.errors import TenureError


class WorkflowChanged(TenureError):
    """The code does something else at this place than it did before; `detail` says what."""

    reason = "workflow_changed"


class StepFailed(TenureError):
    """A step raised, after its retries; `data` has the exception's `type` and `message`, and `attempts`."""

    reason = "step_failed"


class StepTimeout(StepFailed):
    """A step took longer than it may."""

    reason = "step_timeout"


class StepInStep(TenureError):
    """A step was begun inside a step: its result could not be replayed on its own."""

    reason = "step_in_step"


class HandleClosed(TenureError):
    """The handle was finished or closed, or belongs to another process."""

    reason = "handle_closed"


class UnknownWorkflow(TenureError):
    """No such workflow is known to this process."""

    reason = "unknown_workflow"


class ForeignChild(TenureError):
    """The handle is of another execution's child."""

    reason = "foreign_child"


class ChildrenLive(TenureError):
    """The execution may not finish while its children are live; `data["live"]` names them."""

    reason = "children_live"
