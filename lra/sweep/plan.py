"""From a sweep file to runs: names, commands, and the check that they make sense."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from lra.config import build_model, build_task, check_lengths, resolve
from lra.errors import UserError, user_errors
from lra.modules import leaves, load_module
from lra.names import in_stack, suggest
from lra.sweep.grid import Setting, Sweep
from lra.tasks.spec import SPLITS
from lra.training.optimizer import make_optimizer

ROOT = Path(__file__).resolve().parents[2]

RATE = "optim.learning_rate"
#: Keys whose values are right or wrong together.
STRUCTURE = ("model.attention", "model.num_layers")


@dataclasses.dataclass(frozen=True)
class Run:
    """One training, in a directory of its own.

    Attributes:
        name: of its directory: what is varied, and a hash of config, values, rate and seed.
        setting: index of its setting in the sweep.
        rate: learning rate; None for the config's own.
        seed: root seed.
        config: what `--config=` gets.
        values: dotted keys and values, rate and seed included.
        task: the config's.
        stack: its `model.attention`.
        length: training length, in tokens.
        lengths: evaluation lengths, in tokens.
    """

    name: str
    setting: int
    rate: float | None
    seed: int
    config: str
    values: tuple[tuple[str, Any], ...]
    task: str
    stack: str
    length: int
    lengths: tuple[int, ...]

    def train_command(self, workdir: Path, extra: Mapping[str, str]) -> list[str]:
        """The command that trains it; `extra` are keys under `run`."""
        return [
            "train.py",
            f"--config={self.config}",
            f"--workdir={workdir}",
            *(f"--config.{key}={_flag(value)}" for key, value in self.values),
            *(f"--config.{key}={value}" for key, value in extra.items()),
        ]


def _flag(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _load(file: str) -> Any:
    """A config or sweep file's module (`UserError` for one that is not there or fails)."""
    path = _find(file)
    try:
        return load_module(path)
    except Exception as error:
        raise UserError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error


def _find(file: str) -> Path:
    for path in (Path(file), ROOT / file):
        if path.is_file():
            return path
    folder = Path(file).parent
    known = [str(p) for p in folder.glob("*.py")] or [
        p.relative_to(ROOT).as_posix() for p in (ROOT / folder).glob("*.py")
    ]
    raise UserError(f"there is no file {file}.{suggest(file, known)}")


def file_digest(text: str) -> str:
    """SHA-256 of the file of `FILE[:arg]`: git knows nothing of one that is not committed."""
    return hashlib.sha256(_find(text.partition(":")[0]).read_bytes()).hexdigest()


def load_sweep(text: str) -> Sweep:
    """The sweep of `FILE[:arg]`.

    Raises:
        UserError: for a file that is not there or fails, one without `get_sweep`, or an argument
            that it refuses.
    """
    file, _, arg = text.partition(":")
    module = _load(file)
    if not hasattr(module, "get_sweep"):
        raise UserError(f"{file} defines no get_sweep(arg); see configs/sweeps/quickstart.py")
    try:
        sweep = module.get_sweep(arg or None)
    except ValueError as error:
        raise UserError(f"{text}: {error}") from error
    except Exception as error:
        raise UserError(f"{text}: {type(error).__name__}: {error}") from error
    if not isinstance(sweep, Sweep):
        raise UserError(f"get_sweep of {file} must return a Sweep, got {type(sweep).__name__}")
    return checked(sweep)


@dataclasses.dataclass(frozen=True)
class _Base:
    """What a config string gives, before values.

    Attributes:
        given: the config.
        keys: its leaves.
        checked: values that training would take.
    """

    given: Any
    keys: dict[str, Any]
    checked: set[str]

    def check(self, where: str, values: Mapping[str, Any]) -> None:
        """Refuses keys, types and values that training would refuse (`UserError`).

        Each value is tried once, with the setting's stack and layers: grids are large.
        """
        _check_types(where, values, self.keys)
        structure = {key: values[key] for key in STRUCTURE if key in values}
        told = "".join(f", {key}={value}" for key, value in structure.items())
        self._try(where + told, structure)
        for key, value in values.items():
            self._try(f"{where}, {key}={value}", {**structure, key: value})

    def _try(self, where: str, values: Mapping[str, Any]) -> None:
        told = repr(values)
        if told in self.checked:
            return
        tried = self.given.copy_and_resolve_references()
        tried.update_from_flattened_dict(dict(values))
        try:
            resolve(tried)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        self.checked.add(told)


def _base(config: str) -> _Base:
    """Loads a config file with its argument."""
    file, _, arg = config.partition(":")
    try:
        made = _load(file).get_config(arg or None)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{config}: {error}") from error
    return _Base(made, dict(leaves(made)), set())


def _check_types(where: str, values: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if key not in known:
            raise UserError(f"{where}: the config has no key {key!r}.{suggest(key, known)}")
        want = type(known[key])
        fits = isinstance(value, want) and not (want is int and isinstance(value, bool))
        if not fits and not (want is float and type(value) is int):
            raise UserError(
                f"{where}: {key} must be of type {want.__name__}, got {value!r} "
                f"({type(value).__name__})"
            )


def is_search(runs: Sequence[Run]) -> bool:
    """Whether the runs of a setting differ in rate, so that one has to be chosen."""
    return len({run.rate for run in runs}) > 1


def planned(sweep: Sweep, groups: Sequence[Sequence[Run]]) -> int:
    """How many runs it comes to: a setting runs all of its rates with the seeds of the search only."""
    left = len(sweep.seeds) - sweep.search_seeds

    def count(runs: Sequence[Run]) -> int:
        return len(runs) // len(sweep.seeds) * sweep.search_seeds + left

    return sum(count(runs) if is_search(runs) else len(runs) for runs in groups)


def checked(sweep: Sweep) -> Sweep:
    """The sweep with its lists as tuples of plain numbers (`UserError` for anything else)."""
    settings = sweep.settings
    if not isinstance(settings, list | tuple) or not all(isinstance(s, Setting) for s in settings):
        raise UserError("the sweep's settings must be a list of what product and zipped give")
    seeds = _numbers("seeds", sweep.seeds, int)
    if not settings or not seeds:
        raise UserError("the sweep has no runs: it needs settings and seeds")
    if any(not 0 <= seed < 2**32 for seed in seeds):
        raise UserError(f"the sweep's seeds must be at least 0 and less than 2^32, got {seeds}")
    rates = _numbers("rates", sweep.rates, float)
    lengths = _numbers("lengths", sweep.lengths, int)
    settings = [
        dataclasses.replace(s, rates=_numbers(f"rates of {s.config}", s.rates, float))
        for s in settings
    ]
    tried = sweep.search_seeds
    if type(tried) is not int or not 1 <= tried <= len(seeds):
        raise UserError(
            f"the sweep's search_seeds must be from 1 to its {len(seeds)} seed(s), got {tried!r}"
        )
    return Sweep(settings, seeds, rates, lengths, sweep.split, tried)


def _numbers(what: str, listed: Any, kind: type) -> tuple[Any, ...]:
    """A list, range or array of different numbers as a tuple."""
    try:
        found = tuple(getattr(each, "item", lambda each=each: each)() for each in listed)
        whole = all(isinstance(each, int | kind) and not isinstance(each, bool) for each in found)
    except TypeError:
        found, whole = (listed,), False
    if not whole:
        names = {int: "whole numbers", float: "numbers"}
        raise UserError(f"the sweep's {what} must be a list of {names[kind]}, got {listed!r}")
    if len(set(found)) != len(found):
        raise UserError(f"the sweep's {what} hold a value twice: {found}")
    return tuple(map(kind, found))


def _from_root(config: str) -> str:
    """The config as runs, which start in the repository's root, can find it."""
    file, colon, arg = config.partition(":")
    path = _find(file).resolve()
    where = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return f"{where.as_posix()}{colon}{arg}"


def expand(sweep: Sweep, extra: Mapping[str, str] | None = None) -> list[list[Run]]:
    """The runs of each setting: every rate with every seed, rates outside.

    Args:
        sweep: the grid.
        extra: keys under `run` that every run is given, to be checked.

    Raises:
        UserError: for an empty sweep, a config, key or value that does not exist or fit, or a run
            that stands in it twice.
    """
    sweep = checked(sweep)
    if sweep.split not in SPLITS:
        raise UserError(
            f"the sweep's split must be one of {', '.join(SPLITS)}; got {sweep.split!r}"
        )
    check_lengths(tuple(sweep.lengths), "the sweep's lengths")
    bases: dict[str, _Base] = {}
    groups, seen = [], {}
    for index, setting in enumerate(sweep.settings):
        if setting.config not in bases:
            bases[setting.config] = _base(setting.config)
            for key in extra or {}:
                if key not in bases[setting.config].keys:
                    known = [k for k in bases[setting.config].keys if k.startswith("run.")]
                    raise UserError(f"the config has no key {key!r}.{suggest(key, known)}")
        for key in extra or {}:
            if key in dict(setting.values):
                raise UserError(f"{key} stands in the sweep's values and on the command line")
        runs = _runs_of(sweep, setting, index, bases[setting.config])
        for run in runs:
            if run.name in seen:
                raise UserError(
                    f"settings {seen[run.name]} and {index} of the sweep give the same run, {run.name}"
                )
            seen[run.name] = index
        groups.append(runs)
    return groups


def _runs_of(sweep: Sweep, setting: Setting, index: int, base: _Base) -> list[Run]:
    values = dict(setting.values)
    rates: list[float | None] = list(setting.rates or sweep.rates) or [None]
    if RATE in values and rates != [None]:
        raise UserError(f"{setting.config}: {RATE} stands in values and in rates; give one of them")
    if "seed" in values:
        raise UserError(f"{setting.config}: seed stands in values; give the sweep's seeds instead")
    stack = values.get("model.attention", base.given.model.attention)
    for key in values:
        if key.startswith("attention.") and key.split(".")[1] not in in_stack(stack):
            raise UserError(
                f"{setting.config}: {key} has no effect on the stack {stack!r}; give each mechanism's "
                "keywords in a product of its own, and add the lists"
            )
    rate_values = [{RATE: float(rate)} for rate in rates if rate is not None]
    for given in (values, *rate_values):
        base.check(setting.config, given)
    length = values.get("data.length", base.given.data.length)
    lengths = sweep.lengths or values.get("eval.lengths", base.given.eval.lengths) or (length,)
    runs = []
    for rate in rates:
        for seed in sweep.seeds:
            own = {**values, **({} if rate is None else {RATE: float(rate)}), "seed": int(seed)}
            identity = json.dumps([setting.config, sorted(own.items())], default=repr)
            digest = hashlib.sha256(identity.encode()).hexdigest()[:6]
            file, _, arg = setting.config.partition(":")
            parts = [Path(file).stem, *(part.partition("=")[2] for part in arg.split(","))]
            parts += [f"{key.rpartition('.')[2]}{values[key]}" for key in setting.named]
            parts += [] if rate is None else [f"lr{rate:g}"]
            readable = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(filter(None, parts))).strip("-.")
            runs.append(
                Run(
                    name=f"{readable[:80]}-s{seed}-{digest}",
                    setting=index,
                    rate=rate,
                    seed=int(seed),
                    config=_from_root(setting.config),
                    values=tuple(own.items()),
                    task=base.given.task,
                    stack=stack,
                    length=length,
                    lengths=tuple(lengths),
                )
            )
    return runs


def check_tasks(groups: Sequence[Sequence[Run]], extra: Mapping[str, str]) -> None:
    """Builds the task and, without arrays, the model of each setting: what they refuse is told first.

    Args:
        groups: from `expand`.
        extra: keys under `run`.

    Raises:
        UserError: with the run's config and what its task said.
    """
    seen: set[str] = set()
    for run in (runs[0] for runs in groups):
        file, _, arg = run.config.partition(":")
        config = _load(file).get_config(arg or None)
        config.update_from_flattened_dict(dict(run.values))
        for key, value in extra.items():
            if key in ("run.data_dir", "run.release_dir"):
                config.update_from_flattened_dict({key: value})
        sections = ("data", "model", "attention", "optim")
        identity = repr([config.task, run.lengths, *(config[name].to_dict() for name in sections)])
        if identity in seen:
            continue
        seen.add(identity)
        try:
            config = resolve(config)
            with user_errors():
                make_optimizer(config.optim)
                task = build_task(config)
                for length in run.lengths:
                    task.with_length(length)
                jax.eval_shape(
                    lambda config=config, spec=task.spec: nnx.state(
                        build_model(config, spec, nnx.Rngs(params=jax.random.key(0)))
                    )
                )
        except UserError as error:
            raise UserError(f"{run.config}: {error}") from error
