"""What a training step costs beside computing: the host's dispatch, and the input pipeline.

    python -m benchmarks.step_overhead
    python -m benchmarks.step_overhead --data_dir=~/tensorflow_datasets   # Text as well

Dispatch: the compiled training step of a tiny 4-layer model, called as the loop calls it (donated
state, batches laid over all devices). For each stack of mechanisms it prints, in milliseconds,

* call: from the call of `train_step` until it returns, with nothing queued before it; what it
  computes goes on meanwhile, and is waited for, untimed, before the next call;
* blocked: until the result is there as well; the median of the same steps;
* queued: a step's share of a row of steps that are waited for only at the end;
* put_batch: laying one batch of numpy arrays over the devices.

On the CPU, JAX computes in threads of its own (`jax_cpu_enable_async_dispatch`, on by default),
but runs a program that it thinks cheap inside the call. A call that takes more than 90% of its
blocked step is therefore marked: its time is an upper bound of the dispatch. The threads also share
the cores with the host, so other work on the machine raises all figures.

Pipeline: batches/s of `lra.pipeline.train_batches` by itself (batches that were prepared ahead are
drawn first, untimed), the steps/s of the config's tiny model on a batch that is there already, and
their ratio. Recall at length 64, batch 64; with --data_dir, Text at length 1024, batch 16.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from configs import recall, text
from lra import config as configs
from lra import devices
from lra.arguments import at_least
from lra.pipeline import train_batches
from lra.seeds import named_key
from lra.tasks import TaskSpec
from lra.training.optimizer import make_optimizer, make_schedule
from lra.training.state import initial_state, split_model
from lra.training.step import MODEL_KEYS, make_train_step

#: Batches that the pipeline prepares ahead.
PREFETCH = 8


class Trainer:
    """A model in training, without a loop: state goes in and out of `step`.

    Args:
        config: a resolved config.
        spec: the task's constants.
    """

    def __init__(self, config: Any, spec: TaskSpec):
        model = configs.build_model(config, spec, nnx.Rngs(params=named_key(config.seed, "params")))
        graph, params, buffers = split_model(model)
        optimizer, schedule = make_optimizer(config.optim), make_schedule(config.optim)
        self.mesh = devices.data_mesh()
        self.state = jax.device_put(
            initial_state(params, buffers, optimizer), devices.replicated(self.mesh)
        )
        self.keys = named_key(config.seed, "dropout"), named_key(config.seed, "redraw")
        self.train_step = make_train_step(
            graph, optimizer, schedule, accumulate=config.train.accumulate
        )

    def put(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """A batch of the pipeline to the devices, as the loop does it."""
        return devices.put_batch({k: batch[k] for k in MODEL_KEYS}, self.mesh)

    def step(self, batch: dict[str, jax.Array]) -> Any:
        """One step; returns its metrics, which may not be there yet."""
        self.state, metrics = self.train_step(self.state, batch, *self.keys)
        return metrics

    def wait(self) -> None:
        """Until everything that was asked for is there."""
        jax.block_until_ready(self.state)


def dispatch(attention: str, *, layers: int, dim: int, length: int, batch: int, calls: int) -> str:
    """One line of the dispatch table.

    Args:
        attention: stack of mechanisms.
        layers: blocks of the model.
        dim: model width.
        length: tokens of a row.
        batch: rows.
        calls: timed calls.
    """
    config = recall.get_config(f"attention={attention}")
    config.model.update({"num_layers": layers, "dim": dim, "num_heads": 2, "mlp_dim": 2 * dim})
    config.data.length = length
    spec = TaskSpec("random", "tag", 64, 64, length, None, 1 / 64, "random")
    trainer = Trainer(configs.resolve(config), spec)
    rng = np.random.default_rng(0)
    rows = {
        "inputs": rng.integers(64, size=(batch, length), dtype=np.int32),
        "mask": np.ones((batch, length), bool),
        "label": rng.integers(64, size=(batch, length), dtype=np.int32),
        "weight": np.ones((batch, length), np.float32),
    }
    on_device = trainer.put(rows)
    for _ in range(3):
        trainer.step(on_device)
        trainer.wait()
    returned, blocked, put = [], [], []
    for _ in range(calls):
        start = time.perf_counter()
        trainer.step(on_device)
        returned.append(time.perf_counter() - start)
        trainer.wait()
        blocked.append(time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(calls):
        trainer.step(on_device)
    trainer.wait()
    queued = (time.perf_counter() - start) / calls
    for _ in range(calls):
        start = time.perf_counter()
        trainer.put(rows)
        put.append(time.perf_counter() - start)
    middle = [1e3 * statistics.median(times) for times in (returned, blocked, put)]
    inline = "  computed inside the call" if middle[0] > 0.9 * middle[1] else ""
    return (
        f"{attention:<16} call {middle[0]:7.3f}  blocked {middle[1]:7.3f}  "
        f"queued {1e3 * queued:7.3f}  put_batch {middle[2]:7.3f}{inline}"
    )


def pipeline(config: Any, *, batches: int, steps: int) -> str:
    """One line of the pipeline table.

    Args:
        config: of the experiment, as its file gives it.
        batches: timed batches.
        steps: timed steps.
    """
    config = configs.resolve(config)
    task = configs.build_task(config)
    size = config.train.batch_size
    with contextlib.closing(
        train_batches(task, batch_size=size, seed=config.seed, prefetch=PREFETCH)
    ) as iterator:
        batch = next(iterator)
        for _ in range(2 * PREFETCH):
            next(iterator)
        start = time.perf_counter()
        for _ in range(batches):
            next(iterator)
        delivered = batches / (time.perf_counter() - start)
    # The iterator is closed: its thread takes nothing from the steps.
    trainer = Trainer(config, task.spec)
    on_device = trainer.put(batch)
    for _ in range(3):
        trainer.step(on_device)
    trainer.wait()
    start = time.perf_counter()
    for _ in range(steps):
        trainer.step(on_device)
    trainer.wait()
    consumed = steps / (time.perf_counter() - start)
    return (
        f"{config.task:<8} length {config.data.length:<5} batch {size:<3} {config.model.attention:<8} "
        f"delivered {delivered:8.1f} batches/s  consumed {consumed:8.1f} steps/s  "
        f"ratio {delivered / consumed:6.1f}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attention", nargs="+", default=["softmax", "linear"], help="stacks")
    parser.add_argument("--layers", type=at_least(1), default=4, help="blocks (dispatch)")
    parser.add_argument("--dim", type=at_least(1), default=16, help="model width (dispatch)")
    parser.add_argument("--length", type=at_least(1), default=16, help="tokens of a row (dispatch)")
    parser.add_argument("--batch", type=at_least(1), default=2, help="rows (dispatch)")
    parser.add_argument("--calls", type=at_least(1), default=200, help="timed calls (dispatch)")
    parser.add_argument("--batches", type=at_least(1), default=300, help="timed batches (pipeline)")
    parser.add_argument("--steps", type=at_least(1), default=100, help="timed steps (pipeline)")
    parser.add_argument("--data_dir", default="", help="TFDS data directory; without it, no Text")
    args = parser.parse_args(argv)

    print(f"devices: {devices.describe()}")
    print(
        f"dispatch: {args.layers} layers, width {args.dim}, length {args.length}, batch "
        f"{args.batch}; ms, {args.calls} calls"
    )
    for attention in args.attention:
        print(
            dispatch(
                attention,
                layers=args.layers,
                dim=args.dim,
                length=args.length,
                batch=args.batch,
                calls=args.calls,
            ),
            flush=True,
        )
    print("pipeline: delivered alone, against what the tiny model consumes")
    for attention in args.attention:
        print(
            pipeline(
                recall.get_config(f"attention={attention},size=tiny"),
                batches=args.batches,
                steps=args.steps,
            ),
            flush=True,
        )
    if args.data_dir:
        for attention in args.attention:
            config = text.get_config(f"attention={attention},size=tiny")
            config.run.data_dir = str(Path(args.data_dir).expanduser())
            # A step of Text takes a hundred times as long as one of recall.
            line = pipeline(config, batches=args.batches, steps=max(args.steps // 20, 1))
            print(line, flush=True)


if __name__ == "__main__":
    main()
