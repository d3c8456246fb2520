"""What a task is: its constants, its random-access examples, and the protocols between the two."""

import dataclasses
from typing import Any, Literal, Protocol, runtime_checkable

IGNORE = -1
"""Label of a position that carries no label (tag tasks)."""

SPLITS = ("train", "validation", "test")

Kind = Literal["classify", "match", "tag"]
Example = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """Constants of a task; the model and the pipeline are built from them.

    Attributes:
        name: Name in the registry.
        kind: "classify" (one label an example), "match" (one label for two documents that share an
            encoder) or "tag" (a label per position).
        vocab_size: Token ids are 0 … vocab_size − 1, padding included.
        num_classes: Labels are 0 … num_classes − 1.
        max_length: Configured length in tokens: examples are cut to it and batches padded to it.
        pad_id: Id written on padded positions; None where every id is a token (images). Which
            positions are padding always follows from an example's length, never from its ids.
        chance: Accuracy of guessing, in [0, 1].
        data: Data variant, for result rows.
    """

    name: str
    kind: Kind
    vocab_size: int
    num_classes: int
    max_length: int
    pad_id: int | None
    chance: float
    data: str


@runtime_checkable
class Source(Protocol):
    """The examples of one split by index; picklable, because worker processes read it too."""

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def __getitem__(self, index: int) -> Example:
        """Returns example `index`, 0 ≤ index < len(self); otherwise raises IndexError.

        Returns:
            A dict of
            "inputs": token ids, [l] uint8 or int32, not padded, l ≤ max_length; for match tasks a
                pair of such arrays;
            "label": int; for tag tasks int32 [l] with `IGNORE` at positions without label;
            "length": the example's true length in tokens, before it was cut to max_length (match
                tasks: of the longer document).
        """
        ...


@runtime_checkable
class Task(Protocol):
    """A task at one length."""

    @property
    def spec(self) -> TaskSpec:
        """The task's constants."""
        ...

    def source(self, split: str) -> Source:
        """Returns the examples of `split`, one of `SPLITS`; ValueError for another name."""
        ...

    def with_length(self, length: int) -> "Task":
        """Returns the same task, equally difficult, at another length in tokens."""
        ...


def check_split(split: str) -> None:
    """Raises ValueError, listing the splits, unless `split` is one of them."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; the splits are {', '.join(SPLITS)}")


def check_length(length: int) -> None:
    """Raises ValueError unless `length` (tokens) is positive."""
    if length < 1:
        raise ValueError(f"length must be at least 1 token, got {length}")
