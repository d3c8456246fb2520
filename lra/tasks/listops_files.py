"""Preparing ListOps on disk: blocks of trees drawn by a pool of processes, then one TFDS data set.

    <data_dir>/listops/<config>/incomplete_<version>/    work: a lock, blocks/, pack/
    <data_dir>/listops/<config>/<version>/               the whole data set

Blocks are numbered, and each is a function of (variant, seed, number); a split is the first distinct
trees, in the order of the blocks, whose hash selects it. So the data depend neither on the number of
processes nor on interruptions. A block gets its name when it is whole, and the data set gets its
place when everything in it is on disk; what an interrupted run left behind is used by the next.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import threading
import zipfile
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from lra.lock import lock
from lra.progress import Progress
from lra.tasks.listops_trees import (
    VARIANTS,
    VERSION,
    Trees,
    Variant,
    content_hash,
    draw_block,
    split_of,
)

# So many blocks in a row without a tree that is needed mean that there are no more different ones.
_IDLE_BLOCKS = 200


def find_variant(name: str) -> Variant:
    """The variant of a name; ValueError, listing the names, if there is none."""
    if name not in VARIANTS:
        raise ValueError(f"unknown ListOps variant {name!r}; there are: {', '.join(VARIANTS)}")
    return VARIANTS[name]


def config_name(variant: str, data_seed: int) -> str:
    """Name of the TFDS config that holds a variant drawn with a seed."""
    return variant if data_seed == 0 else f"{variant}_seed{data_seed}"


def data_root(data_dir: str | None) -> Path:
    """The TFDS data directory.

    Args:
        data_dir: The directory; None: TFDS's own (TFDS_DATA_DIR, or ~/tensorflow_datasets).
    """
    if data_dir is not None:
        return Path(data_dir).expanduser()
    # TFDS takes about half a second to import.
    from tensorflow_datasets.core import constants

    return Path(constants.DATA_DIR).expanduser()


def is_whole(directory: Path) -> bool:
    """Whether a version is prepared."""
    return (directory / "dataset_info.json").exists()


def prepare(
    variant: str | Variant = "default",
    data_dir: str | None = None,
    workers: int = 2,
    seed: int = 0,
) -> Path:
    """Prepares a ListOps data set, unless it is there already; goes on where an earlier call ended.

    Shows progress on stderr. The bytes written depend on `variant` and `seed` alone.

    Args:
        variant: Name of a variant in `VARIANTS`, or a variant of one's own.
        data_dir: TFDS data directory; None: TFDS's own (TFDS_DATA_DIR, or ~/tensorflow_datasets).
        workers: Processes that draw trees; 0: this one.
        seed: Root seed of the trees, at least 0; data of other seeds stand side by side.

    Returns:
        The directory of the data set, <data_dir>/listops/<config>/<version>.

    Raises:
        ValueError: An argument is out of range, or there are too few different trees.
        UserError: Another process is preparing the same data set.
        ChildProcessError: A process of the pool died.
        OSError: A file cannot be written.
    """
    if isinstance(variant, str):
        variant = find_variant(variant)
    for name, value in (("workers", workers), ("seed", seed)):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    config = config_name(variant.name, seed)
    directory = data_root(data_dir) / "listops" / config / VERSION
    work = directory.with_name(f"incomplete_{VERSION}")
    if is_whole(directory) and not work.exists():
        return directory
    work.mkdir(parents=True, exist_ok=True)
    with lock(work / "lock", f"the preparation of {directory}"):
        if not is_whole(directory):
            chosen = _draw(variant, seed, work / "blocks", workers)
            _pack(variant, seed, config, chosen, work / "pack", directory)
        shutil.rmtree(work)
    return directory


@dataclasses.dataclass
class _Chosen:
    """Which trees make up a split: pairs of a block's file and its rows, in order."""

    rows: list[tuple[Path, np.ndarray]]

    def trees(self) -> Iterator[tuple[np.ndarray, int]]:
        """Reads the trees: (token ids [length] uint8, value)."""
        for path, rows in self.rows:
            trees = _read_block(path).trees
            sequences = trees.split()
            for row in rows:
                yield sequences[row], int(trees.labels[row])


def _draw(variant: Variant, seed: int, folder: Path, workers: int) -> dict[str, _Chosen]:
    """Draws blocks until every split is full.

    Returns:
        The trees of each split.
    """
    folder.mkdir(exist_ok=True)
    for left in folder.glob("*.tmp*"):
        left.unlink(missing_ok=True)
    missing = dict(variant.sizes)
    chosen = {split: _Chosen([]) for split in missing}
    seen: set[bytes] = set()
    idle = 0
    with (
        Progress("drawing trees", sum(missing.values()), unit="trees") as progress,
        contextlib.closing(_blocks(variant, seed, folder, workers)) as blocks,
    ):
        for path in blocks:
            rows: dict[str, list[int]] = {split: [] for split in missing}
            for row, digest in enumerate(_read_block(path).hashes):
                split = split_of(digest)
                if missing[split] and digest not in seen:
                    seen.add(digest)
                    missing[split] -= 1
                    rows[split].append(row)
                    progress.update()
            for split, own in rows.items():
                if own:
                    chosen[split].rows.append((path, np.array(own)))
            if not any(missing.values()):
                return chosen
            idle = 0 if any(rows.values()) else idle + 1
            if idle == _IDLE_BLOCKS:
                raise ValueError(
                    f"ListOps variant {variant.name!r} has too few different trees: "
                    f"{missing} are missing after {idle} blocks without a new one"
                )
    raise AssertionError("unreachable: there is no last block")


def _blocks(variant: Variant, seed: int, folder: Path, workers: int) -> Generator[Path, None, None]:
    """The files of blocks 0, 1, …, each when it is whole; later ones are drawn meanwhile."""

    def path(index: int) -> Path:
        return folder / f"block-{index:05d}.npz"

    if not workers:
        for index in itertools.count():
            _ensure_block(variant, seed, index, path(index))
            yield path(index)
    # Not forked: this process may have threads.
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_start_worker
    )
    ahead: collections.deque[Future[None]] = collections.deque()
    try:
        for index in itertools.count():
            while len(ahead) < 2 * workers:
                due = index + len(ahead)
                ahead.append(pool.submit(_ensure_block, variant, seed, due, path(due)))
            ahead.popleft().result()
            yield path(index)
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a process that draws trees died (killed, or out of memory); the same command goes on "
            "from the blocks that are whole"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Lets a process of the pool end with its parent, whatever ends that, and not before."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@dataclasses.dataclass(frozen=True)
class _Block:
    """What a block's file holds: its trees and their content hashes."""

    trees: Trees
    hashes: list[bytes]


def _settings(variant: Variant, seed: int, index: int) -> str:
    """What a block is a function of, apart from the sizes of splits."""
    values = dataclasses.asdict(variant) | {"seed": seed, "index": index}
    return json.dumps({k: v for k, v in values.items() if k not in variant.sizes})


def _ensure_block(variant: Variant, seed: int, index: int, path: Path) -> None:
    """Draws a block and writes it, unless its file is there and whole."""
    settings = _settings(variant, seed, index)
    try:
        _read_block(path, settings)
        return
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass  # not there, damaged, or of other settings
    trees = draw_block(variant, seed, index)
    hashes = b"".join(map(content_hash, trees.split()))
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            np.savez(
                file,
                settings=np.array(settings),
                tokens=trees.tokens,
                lengths=trees.lengths,
                labels=trees.labels,
                hashes=np.frombuffer(hashes, np.uint8),
            )
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read_block(path: Path, settings: str | None = None) -> _Block:
    """Reads a block's file; every byte is checked against the checksums in it.

    Args:
        path: The file.
        settings: What it must hold; None: anything.

    Raises:
        ValueError: It was drawn with other settings.
        OSError, KeyError, EOFError, zipfile.BadZipFile: It is missing or damaged.
    """
    # Opened here, because np.load does not close a file that is damaged.
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        if settings is not None and str(arrays["settings"]) != settings:
            raise ValueError(f"{path} was drawn with other settings: {arrays['settings']}")
        trees = Trees(arrays["tokens"], arrays["lengths"], arrays["labels"])
        hashes = arrays["hashes"].tobytes()
    return _Block(trees, [hashes[i : i + 16] for i in range(0, len(hashes), 16)])


def _pack(
    variant: Variant,
    seed: int,
    config: str,
    chosen: dict[str, _Chosen],
    folder: Path,
    directory: Path,
) -> None:
    """Writes the data set in `folder` and, when all of it is on disk, moves it to `directory`."""
    # Here and not above, because TFDS takes about half a second to import.
    from lra.tasks.listops_builder import pack

    if folder.exists():
        shutil.rmtree(folder)
    with Progress("writing trees", sum(variant.sizes.values()), unit="trees") as progress:

        def trees(split: str) -> Iterator[tuple[np.ndarray, int]]:
            for tree in chosen[split].trees():
                yield tree
                progress.update()

        whole = pack(variant, seed, config, trees, folder)
    for path in (*whole.iterdir(), whole):
        _sync(path)
    whole.rename(directory)
    _sync(directory.parent)


def _sync(path: Path) -> None:
    """Waits until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
