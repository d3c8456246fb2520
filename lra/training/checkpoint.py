"""Checkpoints that can be believed: the one place that speaks to orbax."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from lra.errors import UserError
from lra.files import write_whole

FOLDER = "checkpoints"
#: Inside a checkpoint: size and SHA-256 of each of its files. Written last, so that a checkpoint
#: without it was never whole.
MANIFEST = "manifest.json"
#: Beside the checkpoints: the step of a save that has begun. Gone when its manifest is there.
SAVING = "saving"
#: Where damaged checkpoints are moved, out of the way of the ones that come again.
ASIDE = "damaged"

_ARRAYS = "arrays"


def _rank(metrics: Any) -> Any:
    """Order of checkpoints by validation: accuracy, then lower loss; a diverged one comes last."""
    accuracy, loss = metrics["accuracy"], metrics["loss"]
    return (accuracy, -loss) if math.isfinite(loss) else (-1.0, 0.0)


def _file_hashes(folder: Path) -> dict[str, list[Any]]:
    """`{relative path: [bytes, SHA-256]}` of every file of a checkpoint but the manifest."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    hashes = {}
    for path in files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        hashes[path.relative_to(folder).as_posix()] = [path.stat().st_size, digest]
    return hashes


def _specs(state: Any) -> dict[str, str]:
    """`float32[3, 4]` of every array of a tree, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}


def array_hashes(state: Any) -> dict[str, list[str]]:
    """Type and shape, and SHA-256 of the bytes, of every array by its path in the tree."""
    specs = _specs(state)
    arrays = (np.ascontiguousarray(jax.device_get(leaf)) for leaf in jax.tree.leaves(state))
    return {
        path: [spec, hashlib.sha256(array.tobytes()).hexdigest()]
        for (path, spec), array in zip(specs.items(), arrays, strict=True)
    }


def damage(folder: Path) -> str | None:
    """What is wrong with the files of a checkpoint; None if they are as they were saved."""
    try:
        stored = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        return f"it has no {MANIFEST}: it was not saved whole"
    except (OSError, ValueError):
        return f"its {MANIFEST} cannot be read"
    try:
        found = _file_hashes(folder)
    except OSError as error:
        return f"it cannot be read ({error})"
    if not isinstance(stored, dict) or not stored:
        return f"its {MANIFEST} is damaged"
    for name, expected in stored.items():
        if name not in found:
            return f"its file {name} is missing"
        if found[name] != expected:
            what = "size" if found[name][0] != expected[0] else "contents"
            return f"the {what} of its file {name} changed after it was saved"
    # A file that somebody else put there (a file manager's, a network file system's) harms nothing.
    return None


class Checkpoints:
    """The checkpoints of one workdir: the latest two, and the best on validation.

    Every file's hash is checked before a checkpoint is used, and every array's hash, taken when it
    was saved, after it is loaded: orbax by itself loads changed data without complaint.

    Saving is synchronous: on the CPU an asynchronous save would still read the arrays that the next
    step, which is given them as donated, overwrites.

    Args:
        workdir: the run's directory; checkpoints stand in `checkpoints/<step>`.
        read_only: for a reader beside a run that may still be training: nothing is moved or removed.

    Raises:
        UserError: unless read-only, if there are checkpoints and all are damaged.
    """

    def __init__(self, workdir: Path, *, read_only: bool = False):
        self._folder = (workdir / FOLDER).resolve()
        self._aside = (workdir / ASIDE).resolve()
        self._steps: list[int] = []
        self._checkpointer: Any = None
        self._failed = False
        #: Why checkpoints that are there are not used, by step.
        self.rejected: dict[int, str] = {}
        unfinished = self._unfinished()
        for step in self._found():
            folder = self._folder / str(step)
            if step == unfinished and not (folder / MANIFEST).exists():
                # A save under way, or one that a kill interrupted: never a checkpoint.
                if not read_only:
                    shutil.rmtree(folder)
            elif (reason := damage(folder)) is None:
                self._steps.append(step)
            elif folder.is_dir():  # else the run that it belongs to has just dropped it
                self.rejected[step] = reason
        if not read_only:
            self._set_aside(self.rejected)
            self._open()

    def _found(self) -> list[int]:
        """Steps of the checkpoints on disk, rising."""
        if not self._folder.is_dir():
            return []
        return sorted(
            int(p.name) for p in self._folder.iterdir() if p.name.isdecimal() and p.is_dir()
        )

    def _unfinished(self) -> int | None:
        """The step whose save has begun and, as far as is known, not ended."""
        try:
            return int((self._folder / SAVING).read_text())
        except (OSError, ValueError):
            return None

    def _set_aside(self, reasons: dict[int, str]) -> None:
        """Moves damaged checkpoints away, if there is a sound one to go on from."""
        if not reasons:
            return
        if not self._steps:
            told = "; ".join(f"checkpoint {step}: {reason}" for step, reason in reasons.items())
            raise UserError(
                f"no checkpoint in {self._folder} can be trusted ({told}). The files are left as "
                "they are; remove that folder to train from the start."
            )
        for step, reason in sorted(reasons.items(), reverse=True):
            earlier = [s for s in self._steps if s < step]
            then = f"falling back to checkpoint {max(earlier)}" if earlier else "it is not used"
            if any(s > step for s in self._steps):
                then = "a later one is sound"
            self._aside.mkdir(exist_ok=True)
            number = sum(p.name.startswith(f"{step}-") for p in self._aside.iterdir())
            target = self._aside / f"{step}-{number}"
            (self._folder / str(step)).rename(target)
            print(
                f"checkpoint {step} is damaged: {reason}; {then}. Moved to {target}",
                file=sys.stderr,
            )

    def _open(self) -> None:
        """Clears what an interrupted save left, and starts orbax's manager."""
        # Not by orbax: its own clean-up goes on in a thread that outlives an early exit.
        for leftover in self._folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(leftover)
        # orbax's own policies do not match the protocols its type annotations ask for.
        policies: Any = ocp.training.preservation_policies
        decisions: Any = ocp.training.save_decision_policies
        self._checkpointer = ocp.training.Checkpointer(
            str(self._folder),
            save_decision_policy=decisions.FixedIntervalPolicy(1),
            preservation_policy=policies.AnyPreservationPolicy(
                [
                    policies.LatestN(2),
                    policies.BestN(
                        get_metric_fn=_rank, n=1, keep_checkpoints_without_metrics=False
                    ),
                ]
            ),
        )

    def save(self, step: int, state: Any, metrics: dict[str, float] | None) -> None:
        """Saves the state after `step` optimizer steps; whole on disk when this returns.

        Args:
            step: steps done.
            state: a tree of arrays.
            metrics: validation `accuracy` and `loss`, if this step was evaluated.

        Raises:
            UserError: if it cannot be written (a full disk, for example). Earlier ones are whole.
        """
        folder = self._folder / str(step)
        try:
            write_whole(self._folder / SAVING, str(step))
            self._checkpointer.save(
                step,
                state,
                metrics=metrics,
                custom_metadata={_ARRAYS: array_hashes(state)},
                force=True,
                overwrite=True,
            )
            write_whole(folder / MANIFEST, json.dumps(_file_hashes(folder), indent=1))
            (self._folder / SAVING).unlink()
        # orbax and tensorstore report a full or read-only disk as errors of many types.
        except Exception as error:
            self._failed = True
            raise UserError(
                f"the checkpoint of step {step} could not be written to {self._folder}: {error}. "
                "Checkpoints before it are whole; make room and run the same command again."
            ) from error
        self._steps = self._found()

    @property
    def latest(self) -> int | None:
        """The newest sound checkpoint's step; None without checkpoints."""
        return self._steps[-1] if self._steps else None

    @property
    def best(self) -> int | None:
        """The step of the sound checkpoint best on validation; None if none was evaluated."""
        measured = [(step, self._metrics(step)) for step in self._steps]
        ranked = [(_rank(metrics), step) for step, metrics in measured if metrics]
        return max(ranked)[1] if ranked else None

    def _metrics(self, step: int) -> dict[str, float] | None:
        """Validation metrics saved with a checkpoint."""
        path = self._folder / str(step) / "metrics" / "metrics"
        return json.loads(path.read_text()) if path.is_file() else None

    def restore(self, step: int, like: Any) -> Any:
        """The state of a checkpoint, or those parts of it that are asked for.

        Args:
            step: which; one of those there.
            like: a dict of trees of arrays or `ShapeDtypeStruct`s with the shardings wanted.

        Raises:
            UserError: if the stored arrays do not fit, or are not those that were saved.
        """
        path = self._folder / str(step)
        if step not in self._steps:
            raise UserError(f"there is no checkpoint {step} in {self._folder}, only {self._steps}")
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
        )
        metadata: Any = ocp.metadata(str(path)).custom_metadata
        parts = tuple(f"['{name}']" for name in like)
        saved = {k: v for k, v in metadata[_ARRAYS].items() if k.startswith(parts)}
        wanted = _specs(like)
        for name in [*wanted, *saved]:
            there, needed = saved.get(name, ["nothing"])[0], wanted.get(name, "nothing")
            if there != needed:
                raise UserError(
                    f"checkpoint {path} does not fit the model and optimizer of this config: it has "
                    f"{there} as {name}, they have {needed}"
                )
        context: Any = ocp.Context()
        context.pytree.loading.partial_load = True
        with context:
            state = ocp.load(str(path), target)
        if saved != array_hashes(state):
            raise UserError(f"checkpoint {path} does not hold the arrays that were saved in it")
        return state

    def close(self) -> None:
        """Ends orbax's threads."""
        if self._checkpointer is not None:
            # After a failed save orbax raises its error once more here, in place of ours.
            with contextlib.suppress(*[Exception] if self._failed else []):
                self._checkpointer.close()
