"""Evaluation of a trained run at many lengths, into results.jsonl."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from lra import config as configs
from lra import devices, provenance
from lra.errors import UserError, user_errors
from lra.evaluation.accuracy import Examples, evaluate, summarise
from lra.jsonl import read_rows, write_rows
from lra.lock import lock
from lra.seeds import named_key
from lra.tasks.baselines import majority_label
from lra.training.checkpoint import FOLDER, Checkpoints
from lra.training.start import check_data, read_run
from lra.training.state import count_parameters, split_model
from lra.training.step import make_eval_step
from lra.training.writer import METRICS_FILE

RESULTS_FILE = "results.jsonl"

#: What makes two rows the same measurement: the later one replaces the earlier, unless it is of
#: fewer examples.
ROW_KEY = ("config_hash", "seed", "step", "checkpoint", "split", "view", "eval_length", "bin")


def evaluate_run(
    workdir: Path,
    *,
    lengths: Sequence[int] = (),
    split: str = "test",
    checkpoint: str = "best",
    limit: int = 0,
    chunk: int = 0,
    overrides: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Measures a run and stores the rows in its results.jsonl.

    One row for each length (view "length"), and, where the config has `eval.bins`, one for each bin of
    true example lengths at the training length (view "bin").

    Args:
        workdir: a directory that `lra.training.loop.train` filled.
        lengths: in tokens; () for `eval.lengths`, else `data.length`.
        split: "train", "validation" or "test".
        checkpoint: "best" on validation or "last".
        limit: only the first so many examples of the split; 0 for all.
        chunk: tokens that a causal model with states of fixed size reads at a time; 0 for all at once.
        overrides: values under `run` for this evaluation (platform, data_dir, …).

    Returns:
        The rows.

    Raises:
        UserError: for a run, split, checkpoint or length that is not there, or a model that cannot be
            read in chunks.
    """
    config = configs.read_config(workdir)
    for key, value in (overrides or {}).items():
        config.run[key] = value
    devices.select(config.run.platform, x64=config.model.dtype == "float64")
    lengths = list(lengths or config.eval.lengths or (config.data.length,))
    configs.check_lengths(lengths, "--lengths")
    if not (workdir / FOLDER).is_dir():
        raise UserError(f"{workdir} holds no checkpoints yet: run train.py on it first")
    with user_errors():
        task = configs.build_task(config)
        check_data(workdir, task)
        tasks = {length: task.with_length(length) for length in lengths}
        rngs = nnx.Rngs(params=named_key(config.seed, "params"))
        model = configs.build_model(config, task.spec, rngs)
        graph, params, buffers = split_model(model)
        for length in lengths:
            # Traced without arrays: a length the model cannot take is refused before any work.
            _trace(graph, params, buffers, tasks[length], chunk)
    mesh = devices.data_mesh()
    arrays = jax.device_put({"params": params, "buffers": buffers}, devices.replicated(mesh))
    step, arrays = _load(workdir, checkpoint, arrays)
    eval_step = make_eval_step(graph, chunk=chunk)
    common = {
        **_provenance(workdir, config),
        "task": config.task,
        "stack": config.model.attention,
        "train_length": config.data.length,
        "split": split,
        "seed": config.seed,
        "step": step,
        "checkpoint": checkpoint,
        "params": count_parameters(params),
        "config_hash": configs.config_hash(config),
    }
    results = workdir / RESULTS_FILE
    _store(results, [])  # a file that cannot be read or written is found before the work
    rows: list[dict[str, Any]] = []
    sizes: dict[int, int] = {}  # examples of the split at each length

    def row(
        view: str, length: int, edges: list[int | None] | None, found: Examples
    ) -> dict[str, Any]:
        spec, summary = tasks[length].spec, summarise(found)
        labels = summary["labels"]
        return {
            **common,
            "view": view,
            "eval_length": length,
            "bin": edges,
            "limit": limit if limit and limit < sizes[length] else None,
            "state_floats": model.state_floats(length),
            "mixing_flops": model.mixing_flops(length),
            **summary,
            "majority": float(found.constant.sum()) / labels if labels else None,
            "chance": spec.chance,
            "data": spec.data,
        }

    with user_errors():
        constant = majority_label(task)
    for length in lengths:
        with user_errors():
            source = tasks[length].source(split)
            sizes[length] = len(source)
            if not sizes[length]:
                raise UserError(f"task {config.task}: the {split} split is empty")
        examples = evaluate(
            eval_step,
            arrays["params"],
            arrays["buffers"],
            tasks[length],
            split,
            mesh=mesh,
            batch_size=batch_size_at(config, length),
            limit=limit,
            workers=config.run.workers,
            progress=f"{split} at length {length}",
            constant=constant,
        )
        new = [row("length", length, None, examples)]
        if length == config.data.length and config.eval.bins:
            edges = [0, *config.eval.bins, None]
            for low, high in itertools.pairwise(edges):
                new.append(row("bin", length, [low, high], examples.between(low, high)))
        _store(results, new)
        rows += new
    return rows


def _load(workdir: Path, kind: str, like: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Step and arrays of the best or the last checkpoint.

    Raises:
        UserError: if there is none, or if a damaged one might be the one that is asked for.
    """
    tries = 3
    for attempt in range(tries):
        checkpoints = Checkpoints(workdir, read_only=True)
        if checkpoints.rejected and attempt < tries - 1:
            time.sleep(1)  # beside a run that is training, what looks damaged may be on its way out
            continue
        if checkpoints.rejected:
            told = "; ".join(f"checkpoint {s}: {why}" for s, why in checkpoints.rejected.items())
            raise UserError(
                f"{workdir} has damaged checkpoints, and a score of another than the {kind} one would "
                f"mislead ({told}). The command that trained the run sets them aside and goes on "
                "from a sound one."
            )
        step = checkpoints.best if kind == "best" else checkpoints.latest
        if step is None:
            raise UserError(f"{workdir} holds no {kind} checkpoint yet: run train.py on it first")
        try:
            return step, checkpoints.restore(step, like)
        except UserError:
            raise
        except Exception:
            # Beside a run that is training: it may have dropped this one for a newer one meanwhile.
            if attempt == tries - 1:
                raise
    raise AssertionError("unreachable")


def batch_size_at(config: configs.Config, length: int) -> int:
    """Examples of an evaluation batch at a length: `eval.batch_size` up to `data.length`, then fewer."""
    return max(1, config.eval.batch_size * config.data.length // max(length, config.data.length))


def _trace(graph: nnx.GraphDef, params: Any, buffers: Any, task: Any, chunk: int) -> None:
    """Runs the model's shape checks at the task's length; computes nothing."""
    spec = task.spec
    shape = (1, 2, spec.max_length) if spec.kind == "match" else (1, spec.max_length)
    label = (1, spec.max_length) if spec.kind == "tag" else (1,)
    batch = {
        "inputs": jax.ShapeDtypeStruct(shape, "int32"),
        "mask": jax.ShapeDtypeStruct(shape, "bool"),
        "label": jax.ShapeDtypeStruct(label, "int32"),
        "weight": jax.ShapeDtypeStruct(label, "float32"),
    }
    # Whole as well as in chunks: only there are positions that the model does not have an error.
    jax.eval_shape(make_eval_step(graph), params, buffers, batch)
    if chunk:
        jax.eval_shape(make_eval_step(graph, chunk=chunk), params, buffers, batch)


def _provenance(workdir: Path, config: configs.Config) -> dict[str, Any]:
    """Versions, commit and the commands that made a number."""

    run = read_run(workdir)
    return {
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "train_commit": run.get("commit"),
        "command": " && ".join(filter(None, [run.get("command"), provenance.command()])),
        "run_platform": jax.devices()[0].platform,
        "temporary_bytes": run.get("temporary_bytes"),
        "step_ms": _step_ms(workdir),
    }


def _step_ms(workdir: Path) -> float | None:
    """Median milliseconds of a training step, from the lines of metrics; the first compiles."""
    try:
        rows = read_rows(workdir / METRICS_FILE)
    except (OSError, UserError):
        return None
    rates = [row["steps_per_second"] for row in rows if "steps_per_second" in row][1:]
    return 1000 / statistics.median(rates) if rates else None


def _store(path: Path, rows: list[dict[str, Any]]) -> None:
    """Adds the rows to the file; a row of the same measurement is replaced where it stands.

    A row of more examples stays, and a line says so.
    """

    def key(row: dict[str, Any]) -> str:
        return repr([row.get(name) for name in ROW_KEY])

    with user_errors(), lock(path.with_suffix(".lock"), str(path), wait=True):
        stored = {key(row): row for row in read_rows(path)} if path.exists() else {}
        for row in rows:
            there = stored.get(key(row))
            if there and (there["n"], not there.get("limit")) > (row["n"], not row["limit"]):
                of = "" if row["bin"] is None else f", bin {row['bin']}"
                if there["n"] > row["n"]:
                    print(
                        f"{path} keeps its row of {there['n']} examples at length "
                        f"{row['eval_length']}{of}: this one of {row['n']} is not stored",
                        file=sys.stderr,
                    )
                continue
            stored[key(row)] = row
        if stored:
            write_rows(path, stored.values())
