"""Typed errors as text: between processes vLLM passes the words of an exception, not its type."""

import re

from logra_lab.errors import InputError, LograError
from logra_lab.sync import errors
from logra_lab.sync.errors import SyncError

_WORDED = re.compile(r"logra_lab\[(\w+): (.*)\]", re.DOTALL)


def worded(error: BaseException) -> str:
    """The text of an error with the name of its type; `find_error` reads it."""
    return f"logra_lab[{type(error).__name__}: {error}]"


def find_error(text: str) -> LograError | None:
    """The error whose `worded` form stands somewhere in a text, by type and message; else None.

    A type that is not this package's own becomes a `SyncError` that names it.
    """
    found = _WORDED.search(text)
    if found is None:
        return None
    known = InputError if found[1] == "InputError" else getattr(errors, found[1], None)
    if isinstance(known, type) and issubclass(known, LograError):
        return known(found[2])
    return SyncError(f"in the engine, {found[1]}: {found[2]}")
