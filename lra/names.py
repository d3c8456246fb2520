"""Names: what was meant, and which mechanisms a stack has."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


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
