"""Names: what was meant, which mechanisms a stack has, which seeds there are."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence


def suggest(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` with the most similar known name, or nothing if none is similar."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def in_stack(stack: str) -> set[str]:
    """The mechanisms that `model.attention` names, unchecked: for commands that load no model.

    Args:
        stack: in the grammar of `models.attention.stack.parse_stack`, which checks it.
    """
    return {re.sub(r"^\d+x", "", part.strip()) for part in stack.split("/")}


def told_seeds(seeds: Sequence[int]) -> str:
    """`seed 0`, or `mean of seeds 0, 1, 2`."""
    listed = ", ".join(map(str, seeds))
    return f"seed {listed}" if len(seeds) == 1 else f"mean of seeds {listed}"
