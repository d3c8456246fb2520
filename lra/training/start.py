"""What happens before the first step: the config, the place to begin, the announcement."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from lra import config as configs
from lra import devices, provenance
from lra.errors import UserError
from lra.files import write_whole
from lra.tasks import Task
from lra.training.checkpoint import Checkpoints
from lra.training.state import TrainState

RUN_FILE = "run.json"


def settle(given: configs.Config, workdir: Path) -> configs.Config:
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
    if now["task"] != before["task"]:
        raise UserError(
            f"{workdir} was started on task {before['task']!r}, not {now['task']!r}; "
            "use another --workdir"
        )
    if lines := configs.differences(before, now):
        raise UserError(
            f"{workdir} was started with another config ({'; '.join(lines)}). "
            "Use another --workdir, or the stored values; only keys under run may change, and "
            "train.steps may grow."
        )
    return config


def check_batch(config: configs.Config) -> None:
    """Refuses batch sizes that devices or accumulation do not divide."""
    count, parts, size = jax.device_count(), config.train.accumulate, config.train.batch_size
    if size % (count * parts):
        raise UserError(
            f"train.batch_size={size} must be a multiple of devices × train.accumulate = "
            f"{count} × {parts} = {count * parts}"
        )


def read_run(workdir: Path) -> dict[str, Any]:
    """What the run's last start wrote of itself; {} if there is none, or it is damaged."""
    try:
        run = json.loads((workdir / RUN_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return run if isinstance(run, dict) else {}


def check_data(workdir: Path, task: Task) -> None:
    """Refuses to go on with other data than the run began with (`UserError`).

    `run.data_dir` and `run.release_dir` may change, as long as they lead to the same variant.
    """
    before = read_run(workdir).get("data")
    if before not in (None, task.spec.data):
        raise UserError(
            f"{workdir} was started on other data ({before}) than it would go on with "
            f"({task.spec.data}); use another --workdir, or the directories of before"
        )


def restore(fresh: TrainState, checkpoints: Checkpoints, init_from: str) -> tuple[int, TrainState]:
    """Where a run begins: its latest checkpoint, else `init_from`'s parameters, else fresh.

    Args:
        fresh: the state before the first step.
        checkpoints: the run's own.
        init_from: a workdir whose best (else latest) parameters and buffers are taken; "" for none.

    Returns:
        Steps done, and the state after them.

    Raises:
        UserError: if `init_from` holds no checkpoint, or one of another shape.
    """
    if (latest := checkpoints.latest) is not None:
        return latest, TrainState(**checkpoints.restore(latest, fresh.as_dict()))
    if not init_from:
        return 0, fresh
    configs.read_config(Path(init_from))
    other = Checkpoints(Path(init_from), read_only=True)
    if other.rejected:
        told = "; ".join(f"checkpoint {step}: {why}" for step, why in other.rejected.items())
        raise UserError(f"init_from={init_from} has damaged checkpoints ({told})")
    best = other.latest if other.best is None else other.best
    if best is None:
        raise UserError(f"init_from={init_from} holds no checkpoint")
    wanted = {"params": fresh.params, "buffers": fresh.buffers}
    return 0, dataclasses.replace(fresh, **other.restore(best, wanted))


def announce(
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
    begun = read_run(workdir).get("begun", []) if start else []
    moment = {"step": start, **{k: facts[k] for k in ("command", "commit", "versions", "devices")}}
    write_whole(path, json.dumps({**facts, "begun": [*begun, moment]}, indent=2) + "\n")
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


def note_memory(workdir: Path, memory: Any) -> None:
    """Adds the compiled step's temporary memory, in bytes, to what the run says of itself.

    Args:
        workdir: the run's directory.
        memory: what XLA says of the compiled step; None where a backend says nothing.
    """
    if memory is not None:
        facts = {**read_run(workdir), "temporary_bytes": memory.temp_size_in_bytes}
        write_whole(workdir / RUN_FILE, json.dumps(facts, indent=2) + "\n")
