"""What an answer that ignores the input would be."""

import numpy as np

from lra.tasks.spec import IGNORE, Task


def majority_label(task: Task, limit: int = 10_000) -> int:
    """The most frequent train label; tag tasks count every position that carries one.

    Args:
        task: The task.
        limit: Train examples that are read, the first ones; 0: all. Thousands settle it where labels
            differ in frequency, and where they do not, either will do.

    Returns:
        The label; of equally frequent ones the smallest.

    Raises:
        ValueError: `limit` is negative, or no label was found.
    """
    if limit < 0:
        raise ValueError(f"limit must not be negative, got {limit}")
    source = task.source("train")
    counts = np.zeros(task.spec.num_classes, np.int64)
    for i in range(min(limit, len(source)) if limit else len(source)):
        label = np.atleast_1d(source[i]["label"])
        counts += np.bincount(label[label != IGNORE], minlength=task.spec.num_classes)
    if not counts.any():
        raise ValueError(f"the train split of task {task.spec.name!r} has no labels")
    return int(counts.argmax())
