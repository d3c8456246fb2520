"""Training, from a config to checkpoints and metrics."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from lra import config as configs
from lra import devices
from lra.errors import UserError, user_errors
from lra.evaluation.accuracy import evaluate, summarise
from lra.files import write_whole
from lra.lock import lock
from lra.pipeline import guarded, train_batches
from lra.progress import Progress
from lra.seeds import named_key
from lra.signals import Stopped, StopRequest
from lra.tasks import Task
from lra.training.checkpoint import Checkpoints
from lra.training.optimizer import make_optimizer, make_schedule
from lra.training.start import (
    announce,
    check_batch,
    check_data,
    note_memory,
    restore,
    settle,
)
from lra.training.state import TrainState, count_parameters, initial_state, split_model
from lra.training.step import MODEL_KEYS, make_eval_step, make_train_step
from lra.training.writer import MetricWriter

#: Written when the last step is done and saved.
FINISHED_FILE = "finished.json"


def train(given: configs.Config, workdir: Path) -> None:
    """Trains until `train.steps`, from the workdir's latest checkpoint if it has one.

    Order of a step: batch t (a function of seed and t) → optimizer step → metrics of the step before
    are written → evaluation if due → checkpoint if due. Evaluations and the last step always save.
    SIGTERM and Ctrl-C save after the step that is under way. A finished run is left as it is.

    Args:
        given: the config of the command.
        workdir: directory of the run; made if missing. One process at a time may train in it.

    Raises:
        UserError: for what the user can mend; the message says how.
        Stopped: after SIGTERM or SIGINT, when the state is saved.
    """
    devices.select(given.run.platform, x64=given.model.dtype == "float64")
    if jax.process_count() > 1:
        raise UserError(f"one process trains a run, got {jax.process_count()} hosts")
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"--workdir={workdir} is a file; name a directory")
    with user_errors():
        workdir.mkdir(parents=True, exist_ok=True)
    with lock(workdir / "train.lock", str(workdir)):
        _train(given, workdir)


def _train(given: configs.Config, workdir: Path) -> None:
    """`train`, holding the lock."""
    config = settle(given, workdir)
    with user_errors():
        task = configs.build_task(config)
        model = configs.build_model(
            config, task.spec, nnx.Rngs(params=named_key(config.seed, "params"))
        )
        optimizer, schedule = make_optimizer(config.optim), make_schedule(config.optim)
        check_batch(config)
        check_data(workdir, task)
        for split in ("train", "validation"):
            source = task.source(split)
            if not len(source):
                raise UserError(f"task {config.task}: the {split} split is empty")
            source[0]  # what cannot be read or generated is told before the work begins
    mesh = devices.data_mesh()
    graph, params, buffers = split_model(model)
    fresh = jax.device_put(initial_state(params, buffers, optimizer), devices.replicated(mesh))
    with contextlib.closing(Checkpoints(workdir)) as checkpoints:
        last, finished = config.train.steps, workdir / FINISHED_FILE
        if finished.exists() and checkpoints.latest == last:
            print(f"{workdir} has finished its {last} steps; nothing to do")
            return
        finished.unlink(missing_ok=True)
        start, state = restore(fresh, checkpoints, config.init_from)
        configs.write_config(config, workdir)
        announce(config, workdir, task, count_parameters(params), start)
        writer = MetricWriter(workdir, step=start, tensorboard=config.run.tensorboard)
        with contextlib.closing(writer), StopRequest() as stop:
            _steps(
                config, workdir, task, graph, optimizer, schedule, state, start, mesh, checkpoints,
                writer, stop,
            )  # fmt: skip
        write_whole(finished, json.dumps({"steps": last}) + "\n")
    print(
        f"done: {last} steps; evaluate with: python eval.py --workdir={shlex.quote(str(workdir))}"
    )


def _steps(
    config: configs.Config,
    workdir: Path,
    task: Task,
    graph: nnx.GraphDef,
    optimizer: Any,
    schedule: Any,
    state: TrainState,
    start: int,
    mesh: jax.sharding.Mesh,
    checkpoints: Checkpoints,
    writer: MetricWriter,
    stop: StopRequest,
) -> None:
    """The loop itself; see `train` for the order of a step."""
    last = config.train.steps
    train_step: Any = make_train_step(
        graph, optimizer, schedule, accumulate=config.train.accumulate
    )
    eval_step = make_eval_step(graph)
    keys = named_key(config.seed, "dropout"), named_key(config.seed, "redraw")
    batches = train_batches(
        task,
        batch_size=config.train.batch_size,
        seed=config.seed,
        start_step=start,
        workers=config.run.workers,
    )
    stream = guarded(batches, config.run.workers)
    progress = Progress("step", last, initial=start, unit="steps")
    note = ""
    pending: tuple[int, dict[str, jax.Array], int] | None = None
    clock, tokens, logged = time.perf_counter(), 0, start

    def write_pending() -> None:
        """Metrics of the step before: by now they are there, and nothing waits for them."""
        nonlocal pending, clock, tokens, logged, note
        if pending is None:
            return
        step, values = pending[0], jax.device_get(pending[1])
        tokens += pending[2]
        pending = None
        weight = max(float(values["weight"]), 1.0)
        loss = float(values["loss_sum"]) / weight
        _check_finite("loss", loss, step)
        _check_finite("norm of the gradient", float(values["grad_norm"]), step)
        if step % config.run.log_every and step != last:
            return
        now = time.perf_counter()
        seconds = max(now - clock, 1e-9)
        row = {
            "loss": loss,
            "accuracy": float(values["correct"]) / weight,
            "grad_norm": float(values["grad_norm"]),
            "learning_rate": float(values["learning_rate"]),
            "steps_per_second": (step - logged) / seconds,
            "tokens_per_second": tokens / seconds,
        }
        writer.write(step, "train", row)
        note = f"loss {loss:.4f}, accuracy {row['accuracy']:.3f}, {row['tokens_per_second']:,.0f} tokens/s"
        clock, tokens, logged = now, 0, step

    with contextlib.closing(batches), progress:
        for step in range(start + 1, last + 1):
            batch = next(stream)
            device_batch = devices.put_batch({k: batch[k] for k in MODEL_KEYS}, mesh)
            if step == start + 1:
                train_step = train_step.lower(state, device_batch, *keys).compile()
                note_memory(workdir, train_step.memory_analysis())
            state, metrics = train_step(state, device_batch, *keys)
            write_pending()
            pending = (step, metrics, int(np.count_nonzero(batch["mask"])))
            progress.update(note)
            due = step % config.train.eval_every == 0 or step == last
            save = config.train.save_every and step % config.train.save_every == 0
            if not (due or save or stop.signal):
                continue
            write_pending()
            measured = None
            if due:
                paused = time.perf_counter()
                examples = evaluate(
                    eval_step,
                    state.params,
                    state.buffers,
                    task,
                    "validation",
                    mesh=mesh,
                    batch_size=config.eval.batch_size,
                    limit=config.train.eval_examples,
                    progress="validation",
                )
                measured = summarise(examples)
                if measured["loss"] is None:
                    raise UserError(f"task {config.task}: no label of validation counts")
                _check_finite("validation loss", measured["loss"], step)
                writer.write(step, "validation", measured)
                progress.say(
                    f"step {step}: validation loss {measured['loss']:.4f}, accuracy "
                    f"{measured['accuracy']:.4f} ± {measured['accuracy_se']:.4f} ({measured['n']} examples)"
                )
                clock += time.perf_counter() - paused
            best_by = measured and {k: measured[k] for k in ("accuracy", "loss")}
            checkpoints.save(step, state.as_dict(), best_by)
            if stop.signal and step < last:
                raise Stopped(
                    f"stopped by {signal.Signals(stop.signal).name}, saved at step {step} of {last}; "
                    "the same command goes on from there",
                    stop.signal,
                )


def _check_finite(what: str, value: float, step: int) -> None:
    """Ends a run whose numbers are no numbers any more (`UserError`)."""
    if not math.isfinite(value):
        raise UserError(
            f"the {what} is {value} at step {step}: training stopped. Checkpoints before it are "
            "whole. Use a lower optim.learning_rate or set optim.clip_norm, in another --workdir."
        )
