"""LRA ListOps: the value, 0 … 9, of nested operations on digits.

The trees are those of `listops_trees`, prepared on disk by `listops_files`, or the LRA release's.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import shlex
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from lra.tasks.listops_files import config_name, data_root, find_variant, is_whole
from lra.tasks.listops_release import open_release
from lra.tasks.listops_trees import PAD, TOKENS, VERSION
from lra.tasks.spec import SPLITS, Example, Task, TaskSpec, check_length, check_split

_CHUNK = 1000  # trees held in memory at once by passes over a split


@runtime_checkable
class _Rows(Protocol):
    """The trees of one split, whole."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> list[tuple[np.ndarray, int]]:
        """The trees at `indices`: (token ids [length] uint8, value)."""
        ...


@dataclasses.dataclass(frozen=True)
class _PreparedRows:
    """The trees of one split of a prepared data set."""

    records: Any  # TFDS data source

    def __len__(self) -> int:
        return len(self.records)

    def read(self, indices: Sequence[int]) -> list[tuple[np.ndarray, int]]:
        # Many records at a time take a fraction of the time of as many single ones; but a single one
        # must not be read this way, which starts threads at every call.
        if len(indices) == 1:
            records = [self.records[indices[0]]]
        else:
            records = self.records.__getitems__(list(indices))
        return [(record["tokens"], int(record["label"])) for record in records]


class _Data:
    """The splits of a data set, each opened once."""

    def __init__(self, variant: str, data_seed: int, data_dir: str | None, release_dir: str | None):
        self._variant, self._data_seed = variant, data_seed
        self._data_dir, self._release_dir = data_dir, release_dir
        self._rows: dict[str, _Rows] = {}

    def rows(self, split: str) -> _Rows:
        """The trees of a split; raises as `ListOps.source`."""
        if split not in self._rows:
            if self._release_dir is not None:
                self._rows[split] = open_release(self._release_dir, split)
            else:
                self._rows[split] = _PreparedRows(self._builder.as_data_source(split))
        return self._rows[split]

    @functools.cached_property
    def _builder(self) -> Any:
        root = data_root(self._data_dir)
        config = config_name(self._variant, self._data_seed)
        directory = root / "listops" / config / VERSION
        if not is_whole(directory):
            seed = f" --seed={self._data_seed}" if self._data_seed else ""
            raise FileNotFoundError(
                f"listops/{config}:{VERSION} is not prepared in the TFDS data directory {root} (no "
                f"{directory / 'dataset_info.json'}); prepare it with: python -m lra.tasks.listops "
                f"--config={self._variant} --data_dir={shlex.quote(str(root))}{seed}"
            )
        from lra.tasks.listops_builder import open_directory

        return open_directory(directory)


@dataclasses.dataclass(frozen=True)
class _ListOpsSource:
    """Examples of one split; see `ListOps`."""

    rows: _Rows
    max_length: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self.rows):
            raise IndexError(f"index {index} is outside 0 … {len(self.rows) - 1}")
        ((tokens, label),) = self.rows.read([int(index)])
        return {"inputs": tokens[: self.max_length], "label": label, "length": len(tokens)}


class ListOps:
    """ListOps; kind "classify", ten classes, token ids as in `listops_trees.TOKENS`.

    Longer trees keep their head. The data are either generated and prepared beforehand, or, for the
    variant "default" and with `release_dir`, the files of the LRA release.
    """

    def __init__(
        self,
        length: int,
        seed: int = 0,
        data_dir: str | None = None,
        release_dir: str | None = None,
        variant: str = "default",
        data_seed: int = 0,
    ):
        """Sets up the task; data are opened by the first `source`.

        Args:
            length: Length in tokens to which trees are cut.
            seed: Not used: every run seed sees the same trees.
            data_dir: TFDS data directory; None: TFDS's own (TFDS_DATA_DIR, or
                ~/tensorflow_datasets).
            release_dir: Directory of the unpacked LRA release, or its folder listops-1000; None:
                the prepared data. Read by the variant "default" alone, which is the one that the
                release has.
            variant: Name of the distribution of trees, a key of `listops_trees.VARIANTS`.
            data_seed: Seed that the data were prepared with.

        Raises:
            ValueError: `length` or `data_seed` is out of range, or `variant` is unknown.
        """
        del seed
        check_length(length)
        find_variant(variant)
        if data_seed < 0:
            raise ValueError(f"data_seed must not be negative, got {data_seed}")
        if variant != "default" and release_dir is not None:
            raise ValueError(
                f"the LRA release has the variant 'default' alone, got variant {variant!r} with "
                f"release_dir {release_dir!r}"
            )
        self._data = _Data(variant, data_seed, data_dir, release_dir)
        generated = f"listops/{variant}:{VERSION}, generated (seed {data_seed})"
        self.spec = TaskSpec(
            name="listops",
            kind="classify",
            vocab_size=len(TOKENS),
            num_classes=10,
            max_length=length,
            pad_id=PAD,
            chance=0.1,
            data=generated if release_dir is None else "listops/default, LRA release",
        )

    def source(self, split: str) -> _ListOpsSource:
        """Returns the examples of `split`.

        Raises:
            FileNotFoundError: The data set is not prepared, or the release has no such file.
            ValueError: `split` is unknown, a row of the release is damaged, or the data were
                prepared with another vocabulary.
        """
        check_split(split)
        return _ListOpsSource(self._data.rows(split), self.spec.max_length)

    def with_length(self, length: int) -> ListOps:
        """Returns the task with the same trees cut to `length` tokens."""
        check_length(length)
        # A shallow copy shares the opened data, so that a release's files are checked only once.
        other = copy.copy(self)
        other.spec = dataclasses.replace(self.spec, max_length=length)
        return other


def root_operator_baseline(task: Task, split: str, limit: int = 0) -> float:
    """Accuracy of answering, for each root operator, its most frequent train label.

    A root that train does not have is answered with train's most frequent label.

    Args:
        task: A classify task whose first token is the root: ListOps.
        split: Split that is scored.
        limit: At most this many examples, the first ones, are read of train and of `split`; 0: all.

    Returns:
        The accuracy, in [0, 1].

    Raises:
        ValueError: `split` is unknown, `limit` is negative, or the split is empty.
    """
    if limit < 0:
        raise ValueError(f"limit must not be negative, got {limit}")
    counts = _root_counts(task, split, limit)
    if not counts.sum():
        raise ValueError(f"split {split!r} of task {task.spec.name!r} is empty")
    return _root_accuracy(_root_counts(task, "train", limit), counts)


def _root_counts(task: Task, split: str, limit: int) -> np.ndarray:
    """Number of examples by first token and label, [vocabulary, classes] int64."""
    source = task.source(split)
    counts = np.zeros((task.spec.vocab_size, task.spec.num_classes), np.int64)
    for i in range(min(limit, len(source)) if limit else len(source)):
        example = source[i]
        counts[example["inputs"][0], example["label"]] += 1
    return counts


def _root_accuracy(train: np.ndarray, counts: np.ndarray) -> float:
    """Accuracy on examples counted in `counts` of each root's most frequent label in `train`."""
    answers = np.where(train.any(axis=1), train.argmax(axis=1), train.sum(axis=0).argmax())
    return float(counts[np.arange(len(counts)), answers].sum() / counts.sum())


def statistics(task: ListOps) -> str:
    """Sizes, lengths, labels and baselines of every split, as a table to print.

    Args:
        task: The task; its length does not matter.

    Returns:
        Lines of text. Lengths are in tokens.
    """
    shares = (0, 5, 25, 50, 75, 95, 100)
    lines = [task.spec.data]
    train = np.zeros((task.spec.vocab_size, task.spec.num_classes), np.int64)
    for split in SPLITS:
        rows = task.source(split).rows
        lengths = np.zeros(len(rows), np.int64)
        counts = np.zeros_like(train)
        for start in range(0, len(rows), _CHUNK):
            chunk = range(start, min(start + _CHUNK, len(rows)))
            for i, (tokens, label) in zip(chunk, rows.read(chunk), strict=True):
                lengths[i] = len(tokens)
                counts[tokens[0], label] += 1
        if split == "train":
            train = counts
        labels = counts.sum(axis=0)
        majority = labels[train.sum(axis=0).argmax()] / len(rows)
        quantiles = np.percentile(lengths, shares).round().astype(int)
        lines += [
            f"{split}: {len(rows)} trees",
            "  lengths    "
            + "  ".join(f"{q}% {n}" for q, n in zip(shares, quantiles, strict=True)),
            "  labels     " + "  ".join(f"{y}: {n:.1%}" for y, n in enumerate(labels / len(rows))),
            f"  baselines  majority {majority:.1%}  root operator {_root_accuracy(train, counts):.1%}",
        ]
    return "\n".join(lines)
