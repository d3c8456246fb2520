"""The TFDS data set "listops": its format, and packing trees into it without TensorFlow or network."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from absl import logging
from tensorflow_datasets.core import writer
from tensorflow_datasets.proto import tf_example_pb2

from lra.tasks.listops_trees import TOKENS, VERSION, Variant

#: Yields the trees of a split in their order, as (token ids [length] uint8, value).
ReadTrees = Callable[[str], Iterator[tuple[np.ndarray, int]]]


class _StableWriter(writer.ExampleWriter):
    """Writes each record with its features in order.

    TFDS leaves the order in a record to protobuf, which shuffles it anew in every process.
    """

    def write(self, path: Any, examples: Iterable[tuple[Any, bytes]]) -> Any:
        try:
            return super().write(path, ((key, _in_order(record)) for key, record in examples))
        except RuntimeError as error:  # array_record's, for whatever keeps it from writing
            raise OSError(str(error)) from error


def _in_order(record: bytes) -> bytes:
    """The same tf.train.Example, serialised the one way."""
    message = tf_example_pb2.Example()  # pyright: ignore[reportAttributeAccessIssue] (made at import)
    message.ParseFromString(record)
    return message.SerializeToString(deterministic=True)


class _Builder(tfds.core.GeneratorBasedBuilder):
    """Writes the trees it is given."""

    name = "listops"
    VERSION = tfds.core.Version(VERSION)

    def __init__(self, *, variant: Variant, seed: int, trees: ReadTrees, **kwargs: Any):
        self._variant, self._seed, self._trees = variant, seed, trees
        super().__init__(**kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        variant = self._variant
        return tfds.core.DatasetInfo(
            builder=self,
            description=(
                f"ListOps: nested operations on digits, of {variant.min_length + 1} to "
                f"{variant.max_length - 1} tokens, depth at most {variant.max_depth}, at most "
                f"{variant.max_args} arguments."
            ),
            features=tfds.features.FeaturesDict(
                {
                    "tokens": tfds.features.Tensor(shape=(None,), dtype=np.uint8, encoding="bytes"),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("tokens", "label"),
            disable_shuffling=True,
            metadata=tfds.core.MetadataDict(vocabulary=list(TOKENS), seed=self._seed),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager
        return {split: self._generate_examples(split) for split in self._variant.sizes}

    def _example_writer(self) -> writer.ExampleWriter:
        return _StableWriter(tfds.core.FileFormat.ARRAY_RECORD)

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        for key, (tokens, label) in enumerate(self._trees(split)):
            yield key, {"tokens": tokens, "label": label}


def pack(variant: Variant, seed: int, config: str, trees: ReadTrees, folder: Path) -> Path:
    """Writes a data set.

    Args:
        variant: The distribution and its sizes.
        seed: Seed the trees were drawn with.
        config: Name of the TFDS config.
        trees: The trees of each split.
        folder: TFDS data directory to write in; no other process must write there.

    Returns:
        The directory of the version, in `folder`.

    Raises:
        OSError: A file cannot be written.
    """
    with _quiet():
        builder = _Builder(
            variant=variant,
            seed=seed,
            trees=trees,
            config=tfds.core.BuilderConfig(name=config, version=VERSION),
            data_dir=str(folder),
            file_format="array_record",
        )
        builder.download_and_prepare(download_dir=str(folder / "downloads"))
        return Path(builder.data_dir)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps TFDS from showing progress of its own and from announcing a download that is none."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    tfds.display_progress_bar(False)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tfds.display_progress_bar(True)
        logging.set_verbosity(verbosity)


def open_directory(directory: Path) -> Any:
    """Opens a prepared version.

    Returns:
        Its read-only TFDS builder.

    Raises:
        ValueError: The ids in it stand for other tokens than `TOKENS`.
    """
    builder = tfds.builder_from_directory(str(directory))
    vocabulary = (builder.info.metadata or {}).get("vocabulary")
    if vocabulary != list(TOKENS):
        raise ValueError(
            f"{directory} was prepared with the vocabulary {vocabulary}, not {list(TOKENS)}; "
            "delete it and prepare it again"
        )
    return builder
