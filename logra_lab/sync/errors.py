"""What can go wrong between trainer and engine, one type each. The weights are as they were."""

from logra_lab.errors import LograError


class SyncError(LograError):
    """Base of the errors of synchronisation."""


class PayloadError(SyncError):
    """The bytes are not a well-formed update or base."""


class TornFile(PayloadError):
    """The file ends before what its header declares: a write was cut off."""


class DigestMismatch(PayloadError):
    """The bytes do not match their SHA-256, or another update already made this version."""


class VersionGap(SyncError):
    """The update starts from another version than the receiver has."""


class WrongRun(SyncError):
    """The update comes from another run."""


class ShapeMismatch(SyncError):
    """The layers of the update and of the receiver differ in name or shape."""


class NeedsFullSync(SyncError):
    """The receiver does not know what its weights are; only a full sync helps."""


class UnsupportedRolloutBackend(SyncError):
    """The engine computes from weights that an update cannot reach."""


class PrefixCacheBusy(SyncError):
    """The engine did not drop its cached keys and values, which belong to the old weights."""
