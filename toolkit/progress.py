"""Progress bars in the calling cell, for anything that takes longer than a moment."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from toolkit.background import current

#: A bar shows itself only if its task lasts this long; anything faster would only flicker.
DELAY_SECONDS = 1.0


class Bars:
    """The bars of one call, by description. Used as a context manager, which removes them at the end."""

    def __init__(self) -> None:
        self._bars: dict[str, Any] = {}

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for bar in self._bars.values():
            if error is None:
                bar.update(bar.total - bar.n)  # tqdm leaves an unfinished bar on the page, as if something had failed
            bar.close()
        self._bars.clear()

    def update(self, description: str, done: int, total: int, *, at_once: bool = False) -> None:
        """Show that `done` of `total` parts of a task are done; the task's first call creates its bar.

        Args:
            at_once: show the bar now, for a task that cannot report again before it ends (an import).
        """
        work = current()
        if work is not None and work.on_progress is not None:
            work.on_progress(description, done, total)
            return
        from tqdm.auto import tqdm

        if description not in self._bars:
            delay = 0.0 if at_once else DELAY_SECONDS
            self._bars[description] = tqdm(desc=description, total=total, leave=False, delay=delay)
        bar = self._bars[description]
        if bar.total != total:  # a task of another length under the same name starts anew
            bar.reset(total)
        bar.update(done - bar.n)
