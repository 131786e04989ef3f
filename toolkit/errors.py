"""The error kinds of the toolkit. Each is also the standard-library error a caller would expect.

They cross process boundaries, so the positional arguments of each are all its state (that is what pickle keeps).
An error raised on a rank arrives in the notebook as the type it was, with `.rank` set and that rank's traceback as a
note; see `ranks.Ranks.call`.
"""

from __future__ import annotations


class SpecError(ValueError):
    """A setting, or a combination of settings, that would do nothing or crash later; says the way out."""


class SessionClosed(RuntimeError):
    """The session was closed; its ranks and their memory are gone."""


class PeerFailed(RuntimeError):
    """Raised on the ranks that are fine when another one failed, so that all leave a step together."""


class RanksLost(RuntimeError):
    """The ranks are gone: one died, or did not come back after a failure. Model state that was not saved is lost.

    Args:
        message: what happened and what to do.
        rank: the rank it happened to, or None when it is not one rank's doing.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


#: Errors that are the user's to fix, whose message is all there is to say.
FRIENDLY = (SpecError, SessionClosed, RanksLost, FileNotFoundError, FloatingPointError)
