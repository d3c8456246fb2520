"""What a result row is, and the check of everything that claims to be one."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CHECKPOINTS = ("best", "last")
VIEWS = ("length", "bin")


class ReportError(ValueError):
    """A report cannot be made; the message is one line that says what to do."""


@dataclass(frozen=True)
class Row:
    """One evaluated setting: one seed, one checkpoint, one evaluation length or length bin.

    Attributes:
        bin: Example lengths in tokens, `low <= length < high` (`high` None: no upper end); None
            for the view "length".
        n: Number of test examples.
        accuracy: Fraction in [0, 1], or None where there is nothing to measure.
        accuracy_se: Standard error of `accuracy` over test examples.
        chance: Accuracy of guessing.
        majority: Accuracy of always answering the most frequent label of the training set.
        state_floats: Numbers that the attention layers keep of an example of `eval_length` tokens.
        mixing_flops: Floating-point operations of their mixing, per token.
        step_ms: Milliseconds of a training step.
        temporary_bytes: Memory of the compiled training step beside parameters and data.
        source: `file:line` the row was read from, or "" for a row that was never in a file.
    """

    task: str
    stack: str
    view: str
    train_length: int
    eval_length: int
    bin: tuple[int, int | None] | None
    split: str
    n: int
    seed: int
    step: int
    checkpoint: str
    accuracy: float | None
    accuracy_se: float | None
    loss: float | None
    chance: float | None
    majority: float | None
    params: int
    state_floats: int | None
    mixing_flops: float | None
    step_ms: float | None
    temporary_bytes: float | None
    config_hash: str
    versions: tuple[tuple[str, str], ...]
    commit: str | None
    data: str
    command: str | None
    source: str = ""

    @property
    def file(self) -> str:
        return self.source.rpartition(":")[0]

    @property
    def key(self) -> tuple[object, ...]:
        """What at most one row of a report may have."""
        setting = (self.task, self.stack, self.train_length, self.data, self.config_hash)
        return (*setting, self.seed, self.checkpoint, self.split, self.view, *self.column)

    @property
    def column(self) -> tuple[int, tuple[int, int | None] | None]:
        return (self.eval_length, self.bin)

    @property
    def values(self) -> tuple[object, ...]:
        """What was measured; equal for two copies of one evaluation."""
        return (self.n, self.accuracy, self.accuracy_se, self.loss)


def _is_int(value: object) -> bool:
    # JSON integers have no bound; a longer one would overflow wherever it becomes a float.
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_number(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _is_fraction(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, int | float) and _is_number(value) and 0 <= value <= 1


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _at_least(low: int) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int) and _is_int(value) and value >= low


def _one_of(names: Sequence[str]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and value in names


# key -> (is the value acceptable, what is expected); every one of them must be in a row.
NEEDED: dict[str, tuple[Callable[[object], bool], str]] = {
    "task": (_is_text, "a non-empty string"),
    "stack": (_is_text, "a non-empty string"),
    "view": (_one_of(VIEWS), "one of " + ", ".join(VIEWS)),
    "train_length": (_at_least(1), "a number of tokens >= 1"),
    "eval_length": (_at_least(1), "a number of tokens >= 1"),
    "split": (_is_text, "a non-empty string"),
    "n": (_at_least(0), "a number of examples >= 0"),
    "seed": (_is_int, "an integer"),
    "step": (_at_least(0), "a number of steps >= 0"),
    "checkpoint": (_one_of(CHECKPOINTS), "one of " + ", ".join(CHECKPOINTS)),
    "accuracy": (_is_fraction, "a number in [0, 1] or null"),
    "accuracy_se": (_is_fraction, "a number in [0, 1] or null"),
    "chance": (_is_fraction, "a number in [0, 1] or null"),
    "majority": (_is_fraction, "a number in [0, 1] or null"),
    "params": (_at_least(0), "a number of parameters >= 0"),
    "config_hash": (_is_text, "a non-empty string"),
    "data": (lambda v: isinstance(v, str), "a string"),
}


def _bin(record: Mapping[str, Any]) -> tuple[int, int | None] | None:
    if record["view"] == "length":
        return None
    match record.get("bin"):
        case [low, high] if _is_int(low) and low >= 0 and (high is None or _is_int(high)):
            if high is None or low < high:
                return (low, high)
    raise ValueError(
        f"bin is {record.get('bin')!r}, expected [low, high] in tokens with 0 <= low < high "
        "(high may be null) for the view 'bin'"
    )


def _optional(record: Mapping[str, Any], key: str) -> float | None:
    value = record.get(key)
    return float(value) if isinstance(value, int | float) and _is_number(value) else None


def parse_row(record: object, source: str = "") -> Row:
    """Checks one decoded result row. Unknown keys are ignored.

    Args:
        record: The decoded JSON value.
        source: `file:line` it came from, kept for messages.

    Returns:
        The row. `loss`, `state_floats`, `mixing_flops`, `step_ms`,
        `temporary_bytes`, `versions`, `commit` and `command` may be absent.

    Raises:
        ValueError: It is not an object, lacks a needed key, or a value is not acceptable.
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"a result row is a JSON object, this is a {type(record).__name__}")
    missing = [key for key in NEEDED if key not in record]
    if missing:
        raise ValueError(f"row lacks the needed key(s) {', '.join(missing)}")
    for key, (accepts, expected) in NEEDED.items():
        if not accepts(record[key]):
            raise ValueError(f"{key} is {record[key]!r}, expected {expected}")
    if record["n"] == 0 and record["accuracy"] is not None:
        raise ValueError(f"accuracy is {record['accuracy']!r} over n = 0 examples, expected null")
    versions = record.get("versions")
    versions = versions if isinstance(versions, Mapping) else {}
    # JSON does not tell 1 from 1.0; as floats both look and count the same.
    fractions = ("accuracy", "accuracy_se", "chance", "majority")
    values: dict[str, Any] = {
        key: float(record[key]) if key in fractions and record[key] is not None else record[key]
        for key in NEEDED
    }
    loss, state_floats = record.get("loss"), record.get("state_floats")
    commit, command = record.get("commit"), record.get("command")
    return Row(
        bin=_bin(record),
        loss=float(loss) if isinstance(loss, int | float) and _is_number(loss) else None,
        state_floats=state_floats if _is_int(state_floats) else None,
        mixing_flops=_optional(record, "mixing_flops"),
        step_ms=_optional(record, "step_ms"),
        temporary_bytes=_optional(record, "temporary_bytes"),
        versions=tuple(sorted((str(name), str(value)) for name, value in versions.items())),
        commit=commit if isinstance(commit, str) and commit else None,
        command=command if isinstance(command, str) and command else None,
        source=source,
        **values,
    )
