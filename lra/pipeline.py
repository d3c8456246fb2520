"""From a task's examples to batches.

The only place that shuffles, pads, batches, divides rows among hosts and prefetches.

A batch is a dict of numpy arrays; B is the number of rows of this host, L the task's length:

    inputs  int32 [B, L]    token ids ([B, 2, L] for match tasks)
    mask    bool            of the shape of inputs; True: a token, False: padding. It follows from
                            the examples' lengths, never from token values.
    label   int32 [B]       ([B, L] for tag tasks), 0 where weight is 0
    weight  float32         of the shape of label; 1: counts, 0: does not
    length  int32 [B]       true lengths in tokens, before examples were cut to L
    valid   bool [B]        only in evaluation; False: a row that fills up the last batch

Each host builds its own rows and no others.
"""

import dataclasses
import multiprocessing
import os
import signal
import threading
import zlib
from collections.abc import Iterator, Sequence

import grain
import numpy as np
from absl import flags

from lra.errors import UserError
from lra.tasks.spec import IGNORE, Source, Task, TaskSpec

Batch = dict[str, np.ndarray]

# Examples in an endless data set. grain's own endless repeat has sys.maxsize of them; it counts
# their batches in floating point, which overflows with one row a batch.
_ENDLESS = 2**48


def train_batches(
    task: Task,
    *,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    workers: int = 0,
    host: int = 0,
    num_hosts: int = 1,
    prefetch: int = 8,
) -> grain.DatasetIterator[Batch]:
    """Endless shuffled batches of the train split.

    Batch t is a function of (task, batch_size, seed, t) alone. Each epoch is a permutation of the
    examples, another one for every epoch and seed; batches run on across epochs. Endless means
    2⁴⁸ examples.

    Args:
        task: The task.
        batch_size: Rows of a global batch, a multiple of `num_hosts`; it may exceed the data set.
        seed: The run's root seed, at least 0.
        start_step: Number t of the first batch, 0 or, after a restart, the number of steps done.
        workers: Processes that prepare batches; 0: a thread of this one. Close the iterator
            (`.close()`) to end them early.
        host: Index of this host, which gets rows host·B/num_hosts … (host + 1)·B/num_hosts − 1.
        num_hosts: Number of hosts.
        prefetch: Batches prepared ahead; 0 (with workers 0): each on demand.

    Returns:
        An iterator of batches; see the module.

    Raises:
        ValueError: An argument is out of range, `num_hosts` does not divide `batch_size`, or the
            split is empty.
        RuntimeError: `workers` is above 0 and absl's flags are not parsed.
    """
    rows = _rows_per_host(batch_size, host, num_hosts)
    for name, value in (("seed", seed), ("start_step", start_step)):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    source = _non_empty(task, "train")
    entropy = np.random.SeedSequence((seed, zlib.crc32(b"pipeline/shuffle")))
    dataset = (
        grain.MapDataset.range(len(source))
        .shuffle(seed=int(entropy.generate_state(1)[0]))
        .repeat(_ENDLESS // len(source) + 1)
        # Global batch t is made of the per-host batches t·H … t·H + H − 1.
        .batch(rows, batch_fn=_ReadRows(source, task.spec, len(source)))[
            start_step * num_hosts + host :: num_hosts
        ]
    )
    return _iterate(dataset, workers, prefetch)


def guarded(batches: Iterator[Batch], workers: int) -> Iterator[Batch]:
    """The batches, with the failure of a worker process told as what it is.

    Args:
        batches: from `train_batches` or `eval_batches`.
        workers: the number of processes they were made with.

    Raises:
        UserError: One of these processes died or failed.
    """
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:
            if not workers:
                raise
            reason = str(error).strip().partition("\n")[0]
            raise UserError(
                f"the {workers} processes that prepare batches failed ({type(error).__name__}: "
                f"{reason}). The same command goes on from the last checkpoint; run.workers=0 does "
                "without them."
            ) from error
        yield batch


def eval_batches(
    task: Task,
    split: str,
    *,
    batch_size: int,
    limit: int = 0,
    host: int = 0,
    num_hosts: int = 1,
    workers: int = 0,
    prefetch: int = 8,
) -> grain.DatasetIterator[Batch]:
    """One pass in order over a split: every example in exactly one row of one host.

    The last batch is filled up to batch_size with rows of weight 0, so that every batch has the
    same shape and every host the same number of batches.

    Args:
        task: The task.
        split: One of the task's splits.
        batch_size: Rows of a global batch, a multiple of `num_hosts`.
        limit: Read only the first `limit` examples; 0: all.
        host: Index of this host; see `train_batches`.
        num_hosts: Number of hosts.
        workers: Processes that prepare batches; see `train_batches`.
        prefetch: Batches prepared ahead; see `train_batches`.

    Returns:
        An iterator of batches with the key "valid"; see the module.

    Raises:
        ValueError: An argument is out of range, `num_hosts` does not divide `batch_size`, the split
            is unknown or it is empty.
        RuntimeError: `workers` is above 0 and absl's flags are not parsed.
    """
    rows = _rows_per_host(batch_size, host, num_hosts)
    if limit < 0:
        raise ValueError(f"limit must not be negative, got {limit}")
    source = _non_empty(task, split)
    num = min(limit, len(source)) if limit else len(source)
    num_batches = -(-num // batch_size)
    dataset = grain.MapDataset.range(num_batches * batch_size).batch(
        rows, batch_fn=_ReadRows(source, task.spec, num, mark_valid=True)
    )[host::num_hosts]
    return _iterate(dataset, workers, prefetch)


@dataclasses.dataclass(frozen=True)
class _ReadRows:
    """Reads the examples at given indices and pads them to the task's length, as one batch.

    Indices from `num_examples` on give rows of weight 0. Batches are made from indices, not from
    examples, because grain's bookkeeping costs tens of microseconds an example that it carries.
    """

    source: Source
    spec: TaskSpec
    num_examples: int
    mark_valid: bool = False

    def __call__(self, indices: Sequence[int]) -> Batch:
        num, length = len(indices), self.spec.max_length
        documents = 2 if self.spec.kind == "match" else 1
        inputs = np.full((num, documents, length), self.spec.pad_id or 0, np.int32)
        mask = np.zeros((num, documents, length), bool)
        label = np.zeros((num, length) if self.spec.kind == "tag" else num, np.int32)
        weight = np.zeros(label.shape, np.float32)
        true_length = np.zeros(num, np.int32)
        valid = np.asarray(indices) < self.num_examples
        for row, index in enumerate(indices):
            if not valid[row]:
                continue
            example = self.source[index]
            tokens = example["inputs"] if documents == 2 else (example["inputs"],)
            for document, ids in enumerate(tokens):
                if len(ids) > length:
                    raise ValueError(
                        f"task {self.spec.name!r} gave {len(ids)} tokens, above its length {length}"
                    )
                inputs[row, document, : len(ids)] = ids
                mask[row, document, : len(ids)] = True
            if self.spec.kind == "tag":
                tags = example["label"]
                label[row, : len(tags)] = np.where(tags == IGNORE, 0, tags)
                weight[row, : len(tags)] = tags != IGNORE
            else:
                label[row] = example["label"]
                weight[row] = 1
            true_length[row] = example["length"]
        if documents == 1:
            inputs, mask = inputs[:, 0], mask[:, 0]
        batch = {
            "inputs": inputs,
            "mask": mask,
            "label": label,
            "weight": weight,
            "length": true_length,
        }
        if self.mark_valid:
            batch["valid"] = valid
        return batch


def _rows_per_host(batch_size: int, host: int, num_hosts: int) -> int:
    """Checks how a global batch is divided among hosts and returns the rows of one."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if num_hosts < 1 or not 0 <= host < num_hosts:
        raise ValueError(f"host must be in 0 … num_hosts - 1, got host {host} of {num_hosts}")
    if batch_size % num_hosts:
        raise ValueError(f"num_hosts {num_hosts} does not divide batch_size {batch_size}")
    return batch_size // num_hosts


def _non_empty(task: Task, split: str) -> Source:
    """Returns the source of `split`; ValueError if it is empty."""
    source = task.source(split)
    if not len(source):
        raise ValueError(f"split {split!r} of task {task.spec.name!r} is empty")
    return source


def _iterate(
    dataset: grain.MapDataset[Batch], workers: int, prefetch: int
) -> grain.DatasetIterator[Batch]:
    """Reads whole batches ahead, in this process or in others.

    `dataset` is batched already: batched after the division among workers, the rows of a batch
    would depend on their number.
    """
    for name, value in (("workers", workers), ("prefetch", prefetch)):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    if not workers:
        # One thread overlaps with the device's work; more would contend for Python's lock.
        threads = min(1, prefetch)
        return iter(dataset.to_iter_dataset(grain.ReadOptions(threads, prefetch)))
    if not flags.FLAGS.is_parsed():
        raise RuntimeError(
            f"{workers} worker processes need absl's flags to be parsed first: start the program "
            "with absl.app.run, or call absl.flags.FLAGS.mark_as_parsed()"
        )
    ahead = max(1, prefetch // workers)
    return iter(
        dataset.to_iter_dataset(grain.ReadOptions(0, 0)).mp_prefetch(
            grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=ahead),
            worker_init_fn=_begin_worker,
        )
    )


def _begin_worker(index: int, count: int) -> None:
    """Lets a worker process end with the one that started it, and not before.

    Ctrl-C reaches every process of a terminal; it is the main one that decides what it means. A main
    process that is killed cannot end its workers, so that they look after it.
    """
    del index, count
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
