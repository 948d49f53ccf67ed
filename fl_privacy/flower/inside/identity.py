"""What a process has to be before it may make messages, and a run that stands for none."""

from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

__all__ = ["Run", "empty_run", "identify_process"]


def identify_process() -> None:
    """Let messages be made in this process, which Flower's own command has not started."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1


def empty_run() -> Run:
    """The run of a grid that serves one alone."""
    return Run.create_empty(run_id=1)
