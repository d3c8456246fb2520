"""LRA Text: the sentiment of IMDB reviews, read byte by byte.

Token = byte + 1, padding 0, 257 ids, two classes; longer reviews keep their head. The data are the
TFDS set imdb_reviews/plain_text:1.0.0, prepared as array_record files, which are read without
TensorFlow. The published set has no validation split; here a part of train is held out.
"""

import copy
import dataclasses
import functools
import hashlib
from typing import Any

import numpy as np

from lra.tasks.spec import Example, TaskSpec, check_length, check_split

_NAME, _VERSION = "imdb_reviews/plain_text", "1.0.0"
_CHUNK = 1000  # reviews held in memory at once by the pass that divides train


def _open_prepared(data_dir: str | None) -> Any:
    """Opens the prepared data set; never starts a download.

    Args:
        data_dir: TFDS data directory; None: TFDS's own (TFDS_DATA_DIR, or ~/tensorflow_datasets).

    Returns:
        Its read-only TFDS builder.

    Raises:
        FileNotFoundError: The data set is not prepared there.
    """
    # TFDS takes about half a second to import; only this task pays for it.
    import tensorflow_datasets as tfds
    from etils import epath
    from tensorflow_datasets.core import constants

    root = epath.Path(constants.DATA_DIR if data_dir is None else data_dir).expanduser()
    directory = root / _NAME / _VERSION
    if not (directory / constants.DATASET_INFO_FILENAME).exists():
        raise FileNotFoundError(
            f"{_NAME}:{_VERSION} is not prepared in the TFDS data directory {root} (no "
            f"{directory / constants.DATASET_INFO_FILENAME}); {_how_to_prepare(str(root))}"
        )
    return tfds.builder_from_directory(directory)


def _how_to_prepare(root: str) -> str:
    return (
        'prepare it with: python -c "import tensorflow_datasets as tfds; '
        f"tfds.builder('{_NAME}:{_VERSION}', data_dir='{root}', file_format='array_record')"
        '.download_and_prepare()"'
    )


class _Published:
    """The published splits of one data directory and their division, each read once."""

    def __init__(self, data_dir: str | None, validation_fraction: float, holdout_seed: int):
        self._data_dir = data_dir
        self._fraction = validation_fraction
        self._seed = holdout_seed

    @functools.cached_property
    def _builder(self) -> Any:
        return _open_prepared(self._data_dir)

    def records(self, published_split: str) -> Any:
        """Returns the TFDS data source of "train" or "test".

        Raises:
            FileNotFoundError: The data set is not prepared.
            ValueError: It is prepared in a format without random access (tfrecord).
        """
        builder = self._builder
        try:
            return builder.as_data_source(published_split)
        except NotImplementedError as error:
            raise ValueError(
                f"{builder.data_path} holds {builder.info.file_format.value} files, which have no "
                "random access without TensorFlow; array_record is needed. In another data "
                f"directory, {_how_to_prepare('DATA_DIR')}"
            ) from error

    @functools.cached_property
    def held_out(self) -> np.ndarray:
        """Which published train reviews are in validation, bool [reviews].

        A hash of a review's bytes decides: copies of a review stay on one side, and the division
        depends neither on the order of the files nor on the seed of the run.
        """
        records = self.records("train")
        salt = f"hold-out {self._seed}\n".encode()
        bound = int(self._fraction * 2**64)
        chosen = np.zeros(len(records), bool)
        for start in range(0, len(records), _CHUNK):
            # Many records at a time: one by one, the pass takes three times as long.
            chunk = range(start, min(start + _CHUNK, len(records)))
            for i, record in zip(chunk, records.__getitems__(list(chunk)), strict=True):
                digest = hashlib.blake2b(salt + record["text"], digest_size=8).digest()
                chosen[i] = int.from_bytes(digest, "little") < bound
        return chosen


@dataclasses.dataclass(frozen=True)
class _TextSource:
    """Examples of one split; see `Text`."""

    records: Any  # TFDS data source of a published split
    indices: np.ndarray  # [examples] int64: positions in it
    max_length: int

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self.indices):
            raise IndexError(f"index {index} is outside 0 … {len(self.indices) - 1}")
        record = self.records[int(self.indices[index])]
        text = np.frombuffer(record["text"], np.uint8)
        inputs = text[: self.max_length].astype(np.int32) + 1
        return {"inputs": inputs, "label": int(record["label"]), "length": len(text)}


class Text:
    """Sentiment of IMDB reviews from their bytes; kind "classify".

    train and validation divide the published train reviews by content, test is the published test
    split. 123 test reviews also stand in the published train split; they are left in both.
    """

    def __init__(
        self,
        length: int,
        seed: int = 0,
        data_dir: str | None = None,
        validation_fraction: float = 0.1,
        holdout_seed: int = 0,
    ):
        """Sets up the task; data are opened by the first `source`.

        Args:
            length: Length in bytes to which reviews are cut.
            seed: Not used: every run seed sees the same division of the data.
            data_dir: TFDS data directory; None: TFDS's own (TFDS_DATA_DIR, or
                ~/tensorflow_datasets).
            validation_fraction: Expected share of the published train reviews that is held out, in
                (0, 1).
            holdout_seed: Selects another hold-out.

        Raises:
            ValueError: `length` or `validation_fraction` is out of range.
        """
        del seed
        check_length(length)
        if not 0 < validation_fraction < 1:
            raise ValueError(f"validation_fraction must be in (0, 1), got {validation_fraction}")
        self._published = _Published(data_dir, validation_fraction, holdout_seed)
        self.spec = TaskSpec(
            name="text",
            kind="classify",
            vocab_size=257,
            num_classes=2,
            max_length=length,
            pad_id=0,
            chance=0.5,
            data=f"{_NAME}:{_VERSION}, hold-out {validation_fraction:g} (seed {holdout_seed})",
        )

    def source(self, split: str) -> _TextSource:
        """Returns the examples of `split`.

        Raises:
            FileNotFoundError: The data set is not prepared.
            ValueError: `split` is unknown or has no example, or the files are not array_record.
        """
        check_split(split)
        if split == "test":
            records = self._published.records("test")
            indices = np.arange(len(records))
        else:
            records = self._published.records("train")
            held_out = self._published.held_out
            indices = np.flatnonzero(held_out if split == "validation" else ~held_out)
        if not indices.size:
            raise ValueError(
                f"split {split!r} of task 'text' is empty: {len(records)} published reviews, "
                f"{self.spec.data}"
            )
        return _TextSource(records, indices, self.spec.max_length)

    def with_length(self, length: int) -> "Text":
        """Returns the task with the same reviews cut to `length` bytes."""
        check_length(length)
        # A shallow copy shares the opened data, so that they are divided only once.
        other = copy.copy(self)
        other.spec = dataclasses.replace(self.spec, max_length=length)
        return other
