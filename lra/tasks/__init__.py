"""The tasks and probes by name."""

import inspect
from collections.abc import Callable
from typing import Any

from lra.names import suggest
from lra.tasks.listops_task import ListOps
from lra.tasks.recall import Recall
from lra.tasks.spec import IGNORE, SPLITS, Source, Task, TaskSpec
from lra.tasks.text import Text

__all__ = ["IGNORE", "SPLITS", "TASKS", "Source", "Task", "TaskSpec", "make_task"]

TASKS: dict[str, Callable[..., Task]] = {"listops": ListOps, "recall": Recall, "text": Text}


def make_task(
    name: str,
    *,
    length: int,
    seed: int,
    data_dir: str | None = None,
    release_dir: str | None = None,
    **own: Any,
) -> Task:
    """Makes a task by name.

    Args:
        name: A key of `TASKS`.
        length: Length in tokens at which the task is set.
        seed: The run's root seed; generated tasks derive their examples from it.
        data_dir: TFDS data directory, for tasks that read one; None: TFDS's default.
        release_dir: Directory of the unpacked LRA release, for tasks that read it.
        **own: Settings of this task alone: the other keywords of its class.

    Returns:
        The task.

    Raises:
        ValueError: `name` is not registered, or the task refuses a value.
        TypeError: A keyword in `own` is not one of the task's.
    """
    if name not in TASKS:
        raise ValueError(
            f"unknown task {name!r}; the tasks are {', '.join(TASKS)}.{suggest(name, TASKS)}"
        )
    shared = {"length": length, "seed": seed, "data_dir": data_dir, "release_dir": release_dir}
    parameters = inspect.signature(TASKS[name]).parameters
    accepted = [p for p in parameters if p not in shared]
    if unknown := [k for k in own if k not in accepted]:
        raise TypeError(
            f"task {name!r} has no setting {', '.join(map(repr, unknown))}; "
            f"its settings are {', '.join(accepted)}"
        )
    return TASKS[name](**{k: v for k, v in shared.items() if k in parameters}, **own)
