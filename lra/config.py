"""From the config a command gives to the task and the model it describes."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from flax import nnx
from ml_collections import ConfigDict

from lra.errors import UserError
from lra.files import write_whole
from lra.tasks import Task, TaskSpec, make_task
from models.attention.stack import parse_stack
from models.encoder import Transformer

#: A ConfigDict whose keys a type checker cannot know.
Config = Any

CONFIG_FILE = "config.json"

#: (section, key, smallest value allowed) of every number with a lower end.
_AT_LEAST = (
    ("data", "length", 1),
    ("model", "num_layers", 1),
    ("model", "dim", 1),
    ("model", "num_heads", 1),
    ("optim", "warmup_steps", 0),
    ("optim", "schedule_steps", 0),
    ("optim", "weight_decay", 0),
    ("optim", "clip_norm", 0),
    ("optim", "eps", 0),
    ("train", "steps", 1),
    ("train", "batch_size", 1),
    ("train", "accumulate", 1),
    ("train", "eval_every", 1),
    ("train", "eval_examples", 0),
    ("train", "save_every", 0),
    ("eval", "batch_size", 1),
    ("run", "workers", 0),
    ("run", "log_every", 1),
)


def resolve(config: Config) -> Config:
    """A checked copy in which what does not take part is left out and lengths of 0 are filled in.

    The sections of mechanisms that the stack does not name are dropped, so that neither results nor
    hashes depend on mechanisms that were not used; `optim.schedule_steps` gets its value.

    Args:
        config: from a config file, after overrides.

    Raises:
        UserError: for a value out of range, an unknown mechanism, or a stack that does not fit.
    """
    config = ConfigDict(config.to_dict())
    for section, key, least in _AT_LEAST:
        value = config[section][key]
        if value < least:
            raise UserError(f"{section}.{key} must be at least {least}, got {value}")
    for name, value in config.optim.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"optim.{name} must be finite, got {value}")
    if not 0 <= config.seed < 2**32:
        raise UserError(f"seed must be at least 0 and less than 2^32, got {config.seed}")
    if not config.optim.learning_rate > 0:
        raise UserError(f"optim.learning_rate must be above 0, got {config.optim.learning_rate}")
    for key in ("b1", "b2"):
        if not 0 <= config.optim[key] < 1:
            raise UserError(f"optim.{key} must be in [0, 1), got {config.optim[key]}")
    check_lengths(config.eval.lengths, "eval.lengths")
    check_lengths(config.eval.bins, "eval.bins")
    if list(config.eval.bins) != sorted(config.eval.bins):
        raise UserError(f"eval.bins must be rising edges, got {tuple(config.eval.bins)}")
    try:
        used = set(parse_stack(config.model.attention, config.model.num_layers))
    except ValueError as error:
        raise UserError(str(error)) from error
    config.attention = ConfigDict({k: v for k, v in config.attention.items() if k in used})
    if not config.optim.schedule_steps:
        config.optim.schedule_steps = max(config.train.steps - config.optim.warmup_steps, 1)
    return config


def check_lengths(lengths: Any, name: str) -> None:
    """Refuses lengths in tokens that are no whole numbers, not positive or stand twice (`UserError`)."""
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in lengths)
    if not whole or len(set(lengths)) != len(tuple(lengths)):
        raise UserError(
            f"{name} must be different whole numbers of at least 1 token, got {tuple(lengths)}"
        )


def to_plain(config: Config) -> dict[str, Any]:
    """The config as JSON has it: nested dicts, tuples as lists."""
    return json.loads(json.dumps(config.to_dict()))


def config_hash(config: Config) -> str:
    """12 hexadecimal digits that name a setting: equal for all seeds and all values under `run`."""
    plain = {k: v for k, v in to_plain(config).items() if k not in ("run", "seed")}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]


def differences(stored: dict[str, Any], given: dict[str, Any], prefix: str = "") -> list[str]:
    """Lines `key: stored → given` for every leaf that differs."""
    lines = []
    for key in sorted(stored.keys() | given.keys()):
        a, b = stored.get(key, "(none)"), given.get(key, "(none)")
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            lines.append(f"{prefix}{key}: {a} → {b}")
    return lines


def write_config(config: Config, workdir: Path) -> None:
    """Stores the config in the workdir, whole or not at all."""
    write_whole(workdir / CONFIG_FILE, json.dumps(to_plain(config), indent=2) + "\n")


def read_config(workdir: Path) -> Config:
    """The config that a workdir was trained with.

    Raises:
        UserError: if the workdir has none, or it cannot be read.
    """
    path = workdir / CONFIG_FILE
    if not path.is_file():
        raise UserError(
            f"{workdir} holds no run: there is no {CONFIG_FILE}. Train first: "
            f"python train.py --workdir={workdir} --config=configs/<task>.py"
        )
    try:
        plain = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    sections = ("data", "model", "attention", "optim", "train", "eval", "run")
    if not isinstance(plain, dict) or not all(isinstance(plain.get(s), dict) for s in sections):
        raise UserError(
            f"{path} is no config of a run: it needs the sections {', '.join(sections)}"
        )
    return ConfigDict(plain)


def build_task(config: Config) -> Task:
    """The task that `config.task` names, with the settings under `config.data`.

    Raises:
        ValueError, TypeError, FileNotFoundError: see `lra.tasks.make_task`.
    """
    return make_task(
        config.task,
        seed=config.seed,
        data_dir=config.run.data_dir or None,
        release_dir=config.run.release_dir or None,
        **config.data.to_dict(),
    )


def build_model(config: Config, spec: TaskSpec, rngs: nnx.Rngs) -> Transformer:
    """The model for a task.

    Raises:
        ValueError, TypeError: see `models.encoder.Transformer`.
    """
    return Transformer(
        kind=spec.kind,
        vocab_size=spec.vocab_size,
        num_classes=spec.num_classes,
        max_length=config.data.length,
        mechanisms=config.attention.to_dict(),
        rngs=rngs,
        **config.model.to_dict(),
    )
