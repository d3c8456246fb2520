"""Checkpoints: the one place that speaks to orbax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from lra.errors import UserError

FOLDER = "checkpoints"


def _rank(metrics: Any) -> Any:
    """Order of checkpoints by validation: accuracy, then lower loss."""
    return metrics["accuracy"], -metrics["loss"]


class Checkpoints:
    """The checkpoints of one workdir: the latest two, and the best on validation.

    Saving is synchronous: on the CPU an asynchronous save would still read the arrays that the next
    step, which is given them as donated, overwrites.

    Args:
        workdir: the run's directory; checkpoints stand in `checkpoints/<step>`.
    """

    def __init__(self, workdir: Path):
        # orbax's own policies do not match the protocols its type annotations ask for.
        policies: Any = ocp.training.preservation_policies
        decisions: Any = ocp.training.save_decision_policies
        self._checkpointer = ocp.training.Checkpointer(
            str((workdir / FOLDER).resolve()),
            save_decision_policy=decisions.FixedIntervalPolicy(1),
            preservation_policy=policies.AnyPreservationPolicy(
                [
                    policies.LatestN(2),
                    policies.BestN(
                        get_metric_fn=_rank, n=1, keep_checkpoints_without_metrics=False
                    ),
                ]
            ),
            cleanup_tmp_directories=True,
        )

    def save(self, step: int, state: Any, metrics: Any) -> None:
        """Saves the state after `step` optimizer steps.

        Args:
            step: steps done.
            state: a tree of arrays.
            metrics: validation `accuracy` and `loss`, if this step was evaluated.
        """
        self._checkpointer.save(step, state, metrics=metrics, force=True, overwrite=True)

    @property
    def latest(self) -> int | None:
        """The newest checkpoint's step; None without checkpoints."""
        last = self._checkpointer.latest
        return None if last is None else last.step

    @property
    def best(self) -> int | None:
        """The step of the checkpoint that was best on validation; None if none was evaluated."""
        measured = [c for c in self._checkpointer.checkpoints if c.metrics]
        return max(measured, key=lambda c: (_rank(c.metrics), c.step)).step if measured else None

    def restore(self, step: int, like: Any) -> Any:
        """The state of a checkpoint.

        Args:
            step: which; one of those there.
            like: a tree of arrays or `ShapeDtypeStruct`s with the shardings wanted.

        Raises:
            UserError: if the stored arrays do not fit.
        """
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
        )
        try:
            return self._checkpointer.load(step, target)
        except (ValueError, KeyError, FileNotFoundError) as error:
            raise UserError(
                f"checkpoint {self._checkpointer.directory}/{step} does not fit this config: {error}"
            ) from error

    def close(self) -> None:
        """Ends orbax's threads."""
        self._checkpointer.close()
