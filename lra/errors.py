"""Errors that are the user's to mend, told in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class UserError(Exception):
    """What was wrong, what was expected, what to do; shown without a traceback."""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turns what a constructor says of bad values into a `UserError`.

    For the phases that only read what the user gave: config, task, model, files. (An AttributeError is
    a stored config that lacks a key.) Outside of these a
    ValueError is a defect of ours and keeps its traceback.
    """
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, OSError, RuntimeError) as error:
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        raise UserError(" ".join(text.split())) from error
