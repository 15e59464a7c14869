"""What becomes of an update after the trainer has applied it: journal, then engine."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from torch import Tensor

from logra_lab.rl.engines import Engine
from logra_lab.rl.rollout import HFEngine
from logra_lab.sync.errors import SyncError, WrongRun
from logra_lab.sync.journal import Journal
from logra_lab.sync.update import ThinUpdate

JOURNAL = "journal"


class Publisher:
    """Keeps a run's engine and journal at the version of the trainer's weights.

    A shared engine has the trainer's weights and needs nothing; others begin with a full sync. An
    engine that refuses an update, or fails in one, gets a full sync before it generates again.

    Args:
        engine: the run's. weights: the trained matrices by layer name, as they are now.
        journal_every: updates between bases of the journal; 0 for no journal.
    """

    def __init__(
        self,
        engine: HFEngine | Engine,
        weights: Callable[[], Mapping[str, Tensor]],
        *,
        journal_every: int = 0,
    ) -> None:
        self.own: Engine | None = None if type(engine) is HFEngine else cast(Engine, engine)
        self.weights, self.every = weights, journal_every
        self.journal: Journal | None = None

    def open_journal(self, run_dir: Path, run: str, version: int) -> None:
        """Begin the journal, or go on with one at `version`: what it holds beyond is cut off.

        Raises `WrongRun`, with nothing changed, for another run's journal.
        """
        if not self.every:
            return
        folder = run_dir / JOURNAL
        if not folder.exists():
            self.journal = Journal.create(folder, run, version, self.weights())
            return
        journal = Journal.open(folder)
        if journal.run != run:
            raise WrongRun(
                f"{folder} is the journal of run {journal.run!r}, this is {run!r}: move it away, "
                "or name another folder for this run"
            )
        self.journal = journal
        if version not in self.journal.versions():  # lost in part, or its base is newer
            self.journal.rebase(version, self.weights())
        self.journal.cut(version)

    def ready(self, run: str, version: int) -> int | None:
        """Before generating: the engine's version, which is `version`; None for a shared engine."""
        if self.own is None:
            return None
        if self.own.version != version:
            self.own.full_sync(self.weights(), run, version)
        return self.own.version

    def publish(self, update: ThinUpdate) -> list[str]:
        """Write and send an update; warnings, if the engine needs a full sync after it."""
        if self.journal is not None:
            self.journal.append(update)
        if self.own is None:
            return []
        try:
            self.own.sync(update)
        except SyncError as error:
            self.own.forget(str(error))
            return [f"the engine did not take update {update.version} ({error}): full sync next"]
        return []

    def shorten(self, version: int) -> None:
        """A new base of the journal, if one is due; `version` is that of the trainer's weights.

        Only when a checkpoint of `version` is on disk: a group's has no weights of its own, and
        those of any earlier version are gone with the old base.
        """
        if self.journal is None:
            return
        if version // self.every > max(self.journal.contents.bases) // self.every:
            self.journal.rebase(version, self.weights())

    def forget(self, why: str) -> None:
        """The trainer's weights have changed by other means: full sync next."""
        if self.own is not None:
            self.own.forget(why)

    def close(self) -> None:
        if self.own is not None:
            self.own.close()
