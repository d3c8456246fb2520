"""How long work shows that it goes on: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import datetime
import sys
import time
from types import TracebackType

from tqdm import tqdm

#: Seconds between lines where there is no terminal.
INTERVAL = 15.0


class Progress:
    """Counts to a total; on stderr.

    Args:
        label: what is counted, in front of the line.
        total: how many there are.
        initial: how many are done already.
        unit: plural name of what is counted.
    """

    def __init__(self, label: str, total: int, *, initial: int = 0, unit: str):
        self._label, self._total, self._unit = label, total, unit
        self._done = self._initial = initial
        self._note = ""
        self._began = self._told = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm(
                desc=label,
                total=total,
                initial=initial,
                unit=f" {unit}",
                dynamic_ncols=True,
                leave=False,
            )

    @property
    def done(self) -> int:
        """How many are done."""
        return self._done

    def update(self, note: str | None = None, *, by: int = 1) -> None:
        """More is done.

        Args:
            note: replaces the text behind the numbers.
            by: how many more; 0 where only the note is news.
        """
        self._done += by
        if note is not None:
            self._note = note
        if self._bar is not None:
            if note is not None:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(by) if by else self._bar.refresh()
        elif (now := time.monotonic()) - self._told >= INTERVAL:
            self._told = now
            rate = (self._done - self._initial) / (now - self._began)
            speed = ""
            if rate > 0:
                left = datetime.timedelta(seconds=round((self._total - self._done) / rate))
                speed = f", {rate:.2f} {self._unit}/s, {left} left"
            note = f", {self._note}" if self._note else ""
            self.say(f"{self._label} {self._done}/{self._total}{speed}{note}")

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
