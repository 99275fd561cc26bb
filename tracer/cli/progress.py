"""A progress bar on standard error, where that is a terminal and the work takes a while; silence everywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress_bar"]

Report = Callable[[str, int, int], None]

_QUIET_SECONDS = 0.5


@contextmanager
def progress_bar() -> Iterator[Report | None]:
    """``report(what, done, total)`` inside the context, None where nobody watches. The bar goes away when the work is done."""
    if not sys.stderr.isatty():
        yield None
        return
    bar = _Bar()
    try:
        yield bar.report
    finally:
        bar.stop()


class _Bar:
    """Loads the drawing package only once there is something to wait for."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._stop: Callable[[], None] | None = None
        self._update: Report | None = None

    def report(self, what: str, done: int, total: int) -> None:
        if self._update is None:
            if time.monotonic() - self._since < _QUIET_SECONDS:
                return
            self._start()
        assert self._update is not None
        self._update(what, done, total)

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
        progress = Progress(*columns, console=Console(stderr=True), transient=True)
        progress.start()
        task = progress.add_task("", total=1)

        def update(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=max(total, 1))

        self._update, self._stop = update, progress.stop

    def stop(self) -> None:
        if self._stop is not None:
            self._stop()
