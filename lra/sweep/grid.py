"""What a sweep file says: settings, their learning rates, seeds, and how they are evaluated."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Setting:
    """One config with its values, to be run at some learning rates and with some seeds.

    Attributes:
        config: what `--config=` gets: `configs/recall.py:attention=linear,size=tiny`.
        values: dotted keys of the config and the values that override its own.
        rates: learning rates to choose from; () for the sweep's.
        named: keys of `values` that stand in the names of runs and in tables, because they are what
            differs between settings.
    """

    config: str
    values: tuple[tuple[str, Any], ...] = ()
    rates: tuple[float, ...] = ()
    named: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """The values that tell this setting from others of its config."""
        return ", ".join(f"{key}={value}" for key, value in self.values if key in self.named)

    @property
    def label(self) -> str:
        """The config, and the values that tell this setting from others."""
        return ", ".join(filter(None, (self.config, self.told)))


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A grid of runs.

    With several rates each setting is first trained at every rate with the first `search_seeds` seeds;
    the rate whose mean is best on validation is then run with all seeds, and only those runs read the
    `split`.

    Attributes:
        settings: from `product`, `zipped`, or written out; lists of them may be added.
        seeds: root seeds.
        rates: learning rates of the settings that have none of their own; () for the config's.
        lengths: evaluation lengths, in tokens; () for each config's own.
        split: what the chosen runs are evaluated on.
        search_seeds: how many seeds, from the first on, every rate is tried with. More than one where
            some seeds learn at a rate and some do not.
    """

    # Written by hand in sweep files: `lra.sweep.plan.expand` checks what they hold.
    settings: Any
    seeds: Any = (0,)
    rates: Any = ()
    lengths: Any = ()
    split: str = "test"
    search_seeds: Any = 1


def product(
    config: str,
    args: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
    rates: Sequence[float] = (),
) -> list[Setting]:
    """Every combination; what stands last varies fastest.

    Args:
        config: a config file.
        args: arguments of the config (behind its colon) and their values: a list, or one value.
        values: dotted keys and their values: a list, or one value. A tuple is one value.
        rates: see `Setting`.
    """
    args, values = args or {}, values or {}
    axes = [_options(value) for value in (*args.values(), *values.values())]
    return [_setting(config, args, values, chosen, rates) for chosen in itertools.product(*axes)]


def zipped(
    config: str,
    args: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
    rates: Sequence[float] = (),
) -> list[Setting]:
    """The lists side by side: the first of each, the second of each. Arguments as for `product`.

    Raises:
        ValueError: for lists of different lengths.
    """
    args, values = args or {}, values or {}
    named = {**args, **values}
    sizes = {key: len(value) for key, value in named.items() if isinstance(value, list)}
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{key} {size}" for key, size in sizes.items())
        raise ValueError(f"zipped lists must be of one length, got {told}")
    count = max(sizes.values(), default=1)
    axes = [
        value if isinstance(value, list) else [value] * count
        for value in (*args.values(), *values.values())
    ]
    return [
        _setting(config, args, values, chosen, rates)
        for chosen in (zip(*axes, strict=True) if axes else [()])
    ]


def _options(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _setting(
    config: str,
    args: Mapping[str, Any],
    values: Mapping[str, Any],
    chosen: Iterable[Any],
    rates: Sequence[float],
) -> Setting:
    chosen = tuple(chosen)
    given = ",".join(f"{k}={v}" for k, v in zip(args, chosen, strict=False))
    return Setting(
        config=f"{config}:{given}" if given else config,
        values=tuple(zip(values, chosen[len(args) :], strict=True)),
        rates=tuple(rates),
        named=tuple(key for key, value in values.items() if len(_options(value)) > 1),
    )
