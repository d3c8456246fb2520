"""A pipe that tells a process when the one that started it is gone."""

from __future__ import annotations

import os
import signal
import threading
import time

#: Names, in a child's environment, the read end of its parent's pipe.
VARIABLE = "LRA_LIFELINE"
#: Seconds between the request to end and the end.
GRACE = 60.0


class Lifeline:
    """The parent's side: nothing is written to the pipe; the kernel closes it with the process.

    A child is started with `pass_fds=(lifeline.read,)` and `lifeline.environment()`, and calls
    `watch`. However the parent ends, SIGKILL included, the child then ends too.
    """

    def __init__(self) -> None:
        self.read, self._write = os.pipe()

    def environment(self) -> dict[str, str]:
        """What to add to a child's environment."""
        return {VARIABLE: str(self.read)}

    def close(self) -> None:
        """Ends the children that watch."""
        os.close(self._write)
        os.close(self.read)


def watch() -> None:
    """The child's side: SIGTERM to this process when the parent is gone, and after a while its end.

    Does nothing where no parent has asked for it.
    """
    text = os.environ.pop(VARIABLE, "")
    if not text:
        return

    def wait() -> None:
        try:
            os.read(int(text), 1)
        except (OSError, ValueError):
            return  # no such pipe: started by something that did not hand it on
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
