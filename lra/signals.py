"""SIGTERM and Ctrl-C as requests that long work answers when it can."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class Stopped(Exception):
    """The user or the cluster asked for an end, and what was done is saved.

    Attributes:
        signal: the signal's number; the process then exits with 128 plus it, as shells expect.
    """

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.signal = number


class StopRequest:
    """Within the block, the first SIGTERM or SIGINT is only noted; a second SIGINT interrupts.

    Attributes:
        signal: number of the signal received, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, object] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
