"""A lock that dies with its owner."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from lra.errors import UserError


@contextlib.contextmanager
def lock(path: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Holds an exclusive lock on a file while the block runs.

    The kernel ends the lock with the process that holds it, however that dies, so a lock that is left
    behind is free to take. The file stays.

    Args:
        path: the lock's file; made if missing.
        what: what is locked, for the message.
        wait: wait for another holder instead of refusing.

    Raises:
        UserError: if another process holds it and `wait` is off; names that process.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            owner = os.read(handle, 200).decode(errors="replace").strip() or "another process"
            raise UserError(
                f"{what} is in use by {owner}; wait for that to end, or choose another directory"
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)
