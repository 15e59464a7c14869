"""Typed errors: every message names the thing, what was expected, what came, and what to do."""


class LograError(Exception):
    """Base of every error this library raises on purpose; the command line exits with status 1."""


class InputError(LograError, ValueError):
    """Bad input (a name, a shape, a file, a setting); the command line exits with status 2."""
