"""Training, from a config to checkpoints and metrics."""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from lra import config as configs
from lra import devices, provenance
from lra.errors import UserError, user_errors
from lra.evaluation.accuracy import evaluate, summarise
from lra.pipeline import train_batches
from lra.progress import Progress
from lra.seeds import named_key
from lra.tasks import Task
from lra.training.checkpoint import Checkpoints
from lra.training.optimizer import make_optimizer, make_schedule
from lra.training.state import TrainState, count_parameters, initial_state, split_model
from lra.training.step import MODEL_KEYS, make_eval_step, make_train_step
from lra.training.writer import MetricWriter

RUN_FILE = "run.json"


def train(given: configs.Config, workdir: Path) -> None:
    """Trains until `train.steps`, from the workdir's latest checkpoint if it has one.

    Order of a step: batch t (a function of seed and t) → optimizer step → metrics of the step before
    are written → evaluation if due → checkpoint if due. Evaluations and the last step always save.

    Where the parameters come from: the latest checkpoint in the workdir, else `init_from`, else
    fresh.

    Args:
        given: the config of the command.
        workdir: directory of the run; made if missing.

    Raises:
        UserError: for what the user can mend; the message says how.
    """
    devices.select(given.run.platform, x64=given.run.x64)
    config = _settle(given, workdir)
    with user_errors():
        task = configs.build_task(config)
        model = configs.build_model(
            config, task.spec, nnx.Rngs(params=named_key(config.seed, "params"))
        )
        optimizer, schedule = make_optimizer(config.optim), make_schedule(config.optim)
        _check_batch(config)
        for split in ("train", "validation"):
            if not len(task.source(split)):
                raise UserError(f"task {config.task}: the {split} split is empty")
    mesh = devices.data_mesh()
    graph, params, buffers = split_model(model)
    with user_errors():
        workdir.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(workdir)
    state = jax.device_put(initial_state(params, buffers, optimizer), devices.replicated(mesh))
    start = checkpoints.latest or 0
    if start:
        state = checkpoints.restore(start, state)
    elif config.init_from:
        state = _warm_start(state, Path(config.init_from))
    with user_errors():
        configs.write_config(config, workdir)
        writer = MetricWriter(workdir, step=start, tensorboard=config.run.tensorboard)
    _announce(config, workdir, task, count_parameters(params), start)
    try:
        _steps(config, task, graph, optimizer, schedule, state, start, mesh, checkpoints, writer)
    finally:
        writer.close()
        checkpoints.close()
    print(f"done: {config.train.steps} steps; evaluate with: python eval.py --workdir={workdir}")


def _settle(given: configs.Config, workdir: Path) -> configs.Config:
    """The resolved config, checked against the one the workdir was started with."""
    if not (workdir / configs.CONFIG_FILE).exists():
        return configs.resolve(given)
    stored = configs.read_config(workdir)
    given = given.copy_and_resolve_references()
    if not given.optim.schedule_steps:
        # Training longer keeps the schedule that was started.
        given.optim.schedule_steps = stored.optim.schedule_steps
    config = configs.resolve(given)
    before, now = configs.to_plain(stored), configs.to_plain(config)
    before.pop("run")
    now.pop("run")
    if now["train"]["steps"] > before["train"]["steps"]:
        before["train"]["steps"] = now["train"]["steps"]
    if lines := configs.differences(before, now):
        raise UserError(
            f"{workdir} was started with another config ({'; '.join(lines)}). "
            "Use another --workdir, or the stored values; only keys under run may change, and "
            "train.steps may grow."
        )
    return config


def _check_batch(config: configs.Config) -> None:
    """Refuses batch sizes that devices or accumulation do not divide."""
    count, parts, size = jax.device_count(), config.train.accumulate, config.train.batch_size
    if size % (count * parts):
        raise UserError(
            f"train.batch_size={size} must be a multiple of devices × train.accumulate = "
            f"{count} × {parts} = {count * parts}"
        )


def _warm_start(state: TrainState, source: Path) -> TrainState:
    """The fresh state with parameters and buffers of another run's best (else latest) checkpoint."""
    configs.read_config(source)
    other = Checkpoints(source)
    step = other.best or other.latest
    if step is None:
        raise UserError(f"init_from={source} holds no checkpoint")
    loaded = other.restore(step, state)
    other.close()
    return TrainState(state.step, loaded.params, loaded.buffers, state.opt_state)


def _announce(
    config: configs.Config, workdir: Path, task: Task, parameters: int, start: int
) -> None:
    """Prints, and stores in the workdir, what runs on what."""
    facts = {
        "command": provenance.command(),
        "commit": provenance.commit(),
        "versions": provenance.versions(),
        "devices": devices.describe(),
        "parameters": parameters,
        "config_hash": configs.config_hash(config),
        "data": task.spec.data,
    }
    path = workdir / RUN_FILE
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(facts, indent=2) + "\n")
    temporary.replace(path)
    print(f"devices: {facts['devices']}")
    print("versions: " + ", ".join(f"{k} {v}" for k, v in facts["versions"].items()))
    print(
        f"task: {config.task} ({task.spec.data}), length {config.data.length}, "
        f"{len(task.source('train'))} train examples"
    )
    print(
        f"model: {config.model.attention}, {parameters:,} parameters, config {facts['config_hash']}"
    )
    print(f"workdir: {workdir}" + (f", resumed at step {start}" if start else ""), flush=True)


def _steps(
    config: configs.Config,
    task: Task,
    graph: nnx.GraphDef,
    optimizer: Any,
    schedule: Any,
    state: TrainState,
    start: int,
    mesh: jax.sharding.Mesh,
    checkpoints: Checkpoints,
    writer: MetricWriter,
) -> None:
    """The loop itself; see `train` for the order of a step."""
    last = config.train.steps
    train_step = make_train_step(graph, optimizer, schedule, accumulate=config.train.accumulate)
    eval_step = make_eval_step(graph)
    dropout_key = named_key(config.seed, "dropout")
    batches = train_batches(
        task,
        batch_size=config.train.batch_size,
        seed=config.seed,
        start_step=start,
        workers=config.run.workers,
        host=jax.process_index(),
        num_hosts=jax.process_count(),
    )
    progress = Progress("step", last, initial=start, unit="step")
    note = ""
    pending: tuple[int, dict[str, jax.Array]] | None = None
    clock, tokens, logged = time.perf_counter(), 0, start

    def write_pending() -> None:
        """Metrics of the step before: by now they are there, and nothing waits for them."""
        nonlocal pending, clock, tokens, logged, note
        if pending is None:
            return
        step, values = pending[0], jax.device_get(pending[1])
        pending = None
        weight = max(float(values["weight"]), 1.0)
        loss = float(values["loss_sum"]) / weight
        if not math.isfinite(loss):
            raise UserError(
                f"the loss is {loss} at step {step}: training stopped. Checkpoints before it are "
                "whole. Lower optim.learning_rate, or set optim.clip_norm."
            )
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
            batch = next(batches)
            tokens += int(np.count_nonzero(batch["mask"])) * jax.process_count()
            device_batch = devices.put_batch({k: batch[k] for k in MODEL_KEYS}, mesh)
            state, metrics = train_step(state, device_batch, dropout_key)
            write_pending()
            pending = (step, metrics)
            progress.update(note)
            due = step % config.train.eval_every == 0 or step == last
            save = config.train.save_every and step % config.train.save_every == 0
            if not (due or save):
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
                writer.write(step, "validation", measured)
                progress.say(
                    f"step {step}: validation loss {measured['loss']:.4f}, accuracy "
                    f"{measured['accuracy']:.4f} ± {measured['accuracy_se']:.4f} ({measured['n']} examples)"
                )
                clock += time.perf_counter() - paused
            checkpoints.save(
                step, state, measured and {k: measured[k] for k in ("accuracy", "loss")}
            )
        write_pending()
