"""Accuracy, loss and their errors over a split: every example counts exactly once."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from lra.devices import put_batch
from lra.pipeline import eval_batches, guarded
from lra.progress import Progress
from lra.tasks import IGNORE, Task
from lra.training.step import MODEL_KEYS


@dataclasses.dataclass(frozen=True)
class Examples:
    """Sums over each example's labels, in the order of the split.

    Attributes:
        loss: cross-entropy, nats.
        correct: labels answered rightly.
        weight: labels that count.
        constant: labels that one constant answer would get right.
        length: true length before truncation, in tokens.
    """

    loss: Float[np.ndarray, "N"]
    correct: Float[np.ndarray, "N"]
    weight: Float[np.ndarray, "N"]
    constant: Float[np.ndarray, "N"]
    length: Int[np.ndarray, "N"]

    def between(self, low: int, high: int | None) -> Examples:
        """The examples with low ≤ length < high (None: no upper end)."""
        keep = self.length >= low
        if high is not None:
            keep &= self.length < high
        return Examples(**{field: values[keep] for field, values in vars(self).items()})


def summarise(examples: Examples) -> dict[str, Any]:
    """Means over labels.

    The standard error treats examples, not labels, as independent: with c correct of w labels in an
    example and accuracy p, it is √Σ(c − p·w)² / Σw (the ratio estimator; Cochran 1977, section 2.11).
    For one label an example that is √(p(1 − p)/n).

    Returns:
        `n` examples, `labels` that count, and `accuracy`, `accuracy_se` and `loss` (nats a label),
        which are None where nothing counts; one example has no `accuracy_se`.
    """
    labels = examples.weight.sum()
    counts: dict[str, Any] = {"n": len(examples.weight), "labels": int(labels)}
    if not labels:
        return {**counts, "accuracy": None, "accuracy_se": None, "loss": None}
    accuracy = examples.correct.sum() / labels
    spread = np.sqrt(((examples.correct - accuracy * examples.weight) ** 2).sum()) / labels
    return {
        **counts,
        "accuracy": float(accuracy),
        "accuracy_se": float(spread) if len(examples.weight) > 1 else None,
        "loss": float(examples.loss.sum() / labels),
    }


def evaluate(
    eval_step: Callable[..., dict[str, jax.Array]],
    params: Any,
    buffers: Any,
    task: Task,
    split: str,
    *,
    mesh: Mesh,
    batch_size: int,
    limit: int = 0,
    workers: int = 0,
    progress: str,
    constant: int | None = None,
) -> Examples:
    """Runs a model over a split.

    Args:
        eval_step: from `make_eval_step`.
        params: trained arrays.
        buffers: other arrays.
        task: at the length to be evaluated.
        split: "train", "validation" or "test".
        mesh: from `data_mesh`.
        batch_size: examples at a time over all hosts; rounded up to the number of devices.
        limit: only the first examples; 0 for all.
        workers: processes that prepare batches.
        progress: what the line of progress calls this.
        constant: the label of a constant answer that is scored beside the model; None: none is.

    Raises:
        ValueError: if the split is empty.
    """
    devices = mesh.devices.size
    batch_size = -(-batch_size // devices) * devices
    total = len(task.source(split))
    batches = eval_batches(
        task,
        split,
        batch_size=batch_size,
        limit=limit,
        workers=workers,
    )
    parts: list[dict[str, np.ndarray]] = []
    steps = -(-(min(limit, total) if limit else total) // batch_size)
    with contextlib.closing(batches), Progress(progress, steps, unit="batches") as bar:
        for batch in guarded(batches, workers):
            device_batch = put_batch({k: batch[k] for k in MODEL_KEYS}, mesh)
            sums = jax.device_get(eval_step(params, buffers, device_batch))
            # A label that there is none of stands for no constant answer: it is right nowhere.
            hits = batch["weight"] * (batch["label"] == (IGNORE if constant is None else constant))
            sums["constant"] = hits.reshape(len(hits), -1).sum(-1)
            parts.append({**sums, **{k: np.array(batch[k]) for k in ("length", "valid")}})
            bar.update()
    joined = {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}
    valid = joined["valid"]
    return Examples(
        loss=joined["loss"][valid].astype(np.float64),
        correct=joined["correct"][valid].astype(np.float64),
        weight=joined["weight"][valid].astype(np.float64),
        constant=joined["constant"][valid].astype(np.float64),
        length=joined["length"][valid],
    )
