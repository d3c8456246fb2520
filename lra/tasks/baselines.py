"""What an answer that ignores the input scores."""

import numpy as np

from lra.tasks.spec import IGNORE, Task


def majority_accuracy(task: Task, split: str, limit: int = 10_000) -> float:
    """Accuracy of always answering the most frequent train label.

    Tag tasks count every position that carries a label.

    Args:
        task: The task.
        split: Split that is scored.
        limit: At most this many examples, the first ones, are read of train and of `split`; 0: all.

    Returns:
        The accuracy, in [0, 1].

    Raises:
        ValueError: `split` is unknown, `limit` is negative, or no label was found.
    """
    if limit < 0:
        raise ValueError(f"limit must not be negative, got {limit}")
    counts = _label_counts(task, split, limit)
    if not counts.sum():
        raise ValueError(f"split {split!r} of task {task.spec.name!r} has no labels")
    majority = int(_label_counts(task, "train", limit).argmax())
    return float(counts[majority] / counts.sum())


def _label_counts(task: Task, split: str, limit: int) -> np.ndarray:
    """Number of times each label stands in the first `limit` examples of `split`, int64 [C]."""
    source = task.source(split)
    num = min(limit, len(source)) if limit else len(source)
    counts = np.zeros(task.spec.num_classes, np.int64)
    for i in range(num):
        label = np.atleast_1d(source[i]["label"])
        counts += np.bincount(label[label != IGNORE], minlength=task.spec.num_classes)
    return counts
