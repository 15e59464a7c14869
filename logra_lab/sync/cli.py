"""What `logra-lab sync` does: say what a journal holds, check it, and write a version's weights."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import safetensors.torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from safetensors import SafetensorError

from logra_lab.atomic import sync_folder
from logra_lab.errors import InputError
from logra_lab.sync import journal_files as files
from logra_lab.sync.errors import PayloadError, ShapeMismatch, SyncError, TornFile
from logra_lab.sync.journal import Journal
from logra_lab.sync.update import ThinUpdate
from logra_lab.sync.wire import payload_bytes


def _console() -> Console:
    """Wide enough for its tables where no terminal says how wide it is."""
    return Console() if sys.stdout.isatty() else Console(width=120, no_color=True, highlight=False)


def inspect(path: Path, *, layers: bool = False) -> None:
    """Print what a journal or one of its files holds, and its bytes beside the closed form and
    beside all targets in bfloat16. Of a journal headers are read, of a file everything.

    Raises `InputError` for a path that is neither, and what `Journal.open` raises.
    """
    console = _console()
    if path.is_dir():
        journal = Journal.open(path)
        entries, shapes = list(journal.contents.bases.values()), journal.contents.shapes
        entries += [entry for _, entry in sorted(journal.contents.updates.items())]
        versions = _spans(journal.versions())
        console.print(f"journal of run {journal.run!r}, versions {versions}", markup=False)
        console.print(_table(entries))
        console.print(f"{len(shapes)} layers; {journal.size:,} bytes in {len(entries)} files")
        _say_left_over(console, journal)
    else:
        entry, text = _one(path)
        entries, shapes = [entry], entry.shapes
        console.print(f"{text} of run {entry.run!r}, {len(shapes)} layers", markup=False)
        console.print(_table(entries))
        console.print(f"SHA-256 {entry.digest}: every byte checked")
    if layers:
        console.print(_layer_table(shapes, {e.rank: e.wire for e in entries if e.rank}))


def verify(folder: Path, *, policy: str | None = None) -> None:
    """Check every byte of a journal and that no version lacks; with `policy` that each layer is
    one of that policy's, in its shape.

    Raises `DigestMismatch`, `VersionGap`, `WrongRun`, `ShapeMismatch`, `TornFile` (also for a torn
    last record, which replay leaves out), naming the file.
    """
    journal = Journal.open(folder)
    journal.verify()
    if journal.dropped:
        last = journal.versions()[-1]
        raise TornFile(f"{'; '.join(journal.dropped)}; the journal is whole up to version {last}")
    if policy is not None:
        _check_policy(journal, policy)
    console = _console()
    count = len(journal.contents.bases) + len(journal.contents.updates)
    fits = "" if policy is None else f", fits {policy}"
    console.print(
        f"whole: run {journal.run!r}, versions {_spans(journal.versions())}, {count} files, "
        f"{journal.size:,} bytes{fits}",
        markup=False,
    )
    _say_left_over(console, journal)


def replay(folder: Path, version: int | None, out: Path, *, force: bool = False) -> None:
    """Write the weights of a version (the last by default) to `out`: float32, `<layer>.weight`.

    `out` appears whole or not at all. Raises `InputError` (it exists and `force` is not set, its
    folder does not, the version is not held) and what `Journal.weights` raises.
    """
    if out.is_dir() or not out.parent.is_dir() or out.resolve().parent == folder.resolve():
        raise InputError(f"--out {out}: expected a file in a folder that exists, not the journal's")
    if out.exists() and not force:
        raise InputError(f"--out {out}: it exists; give --force to replace it, or another name")
    journal = Journal.open(folder)
    held = journal.versions()
    if version is not None and version not in held:
        raise InputError(f"--version {version}: {folder} holds versions {_spans(held)}")
    found, weights = journal.weights(version)
    temporary = out.with_name(out.name + ".tmp")
    try:
        tensors = {f"{name}.weight": weight for name, weight in weights.items()}
        temporary.touch()
        mode = temporary.stat().st_mode  # by the umask; safetensors makes files for the owner only
        # "format" is what transformers asks of a file of weights.
        safetensors.torch.save_file(tensors, temporary, {"format": "pt"})
        with open(temporary, "rb+") as file:
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, out)
        sync_folder(out.parent)
    except (OSError, SafetensorError) as error:
        raise SyncError(
            f"{out} could not be written: {error}; make room, or name another"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    text = f"{out}: {len(weights)} layers of run {journal.run!r} at version {found}"
    Console().print(text, markup=False)


def _one(path: Path) -> tuple[files.Entry, str]:
    """A base or an update by itself, with every byte checked, and what it is."""
    if path.suffix != ".thin" and not path.match("base-*.safetensors"):
        raise InputError(f"{path}: expected a journal's folder, a .thin or a base-*.safetensors")
    try:
        files.verify(path)  # first of all: a file of any size may have this name
        if path.suffix != ".thin":
            entry = files.read_base(path)
            return entry, f"base at version {entry.version}"
        data = path.read_bytes()
        u = ThinUpdate.from_bytes(data, max_bytes=len(data))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except PayloadError as error:
        named = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise type(error)(named) from error
    text = f"update from version {u.base} to {u.version} (seed {u.seed}, draw {u.draw}, "
    return files.read_update(path), f"{text}{u.kind} projection, scheme {u.scheme})"


def _table(entries: Sequence[files.Entry]) -> Table:
    """One row a base, and one for updates in a row that are of one kind."""
    table = Table("what", "versions", "wire", "rank", "bytes each", "numbers", "header", "of bf16")
    for column in table.columns[3:]:
        column.justify = "right"
    for (rank, wire), run in groupby(entries, key=lambda e: (e.rank, e.wire)):
        group = list(run)
        for some in [group] if rank else [[entry] for entry in group]:
            table.add_row(*_row(some, rank, wire))
    return table


def _row(entries: Sequence[files.Entry], rank: int, wire: str) -> Iterator[str]:
    shapes = entries[0].shapes.values()
    size = sum(entry.size for entry in entries) / len(entries)
    weights = sum(d * k for d, k in shapes)
    numbers = payload_bytes(shapes, rank, wire) if rank else 4 * weights
    yield f"{len(entries)} updates" if rank else "base"
    yield _spans([entry.version for entry in entries])
    yield wire
    yield str(rank) if rank else ""
    yield f"{size:,.0f}"
    yield f"{numbers:,}"
    yield f"{100 * (size - numbers) / numbers:+.2f} %"
    yield f"{100 * size / (2 * weights):.2f} %"


def _layer_table(shapes: files.Shapes, wires: dict[int, str]) -> Table:
    heads = [f"bytes at rank {rank}, {wire}" for rank, wire in wires.items()]
    table = Table("layer", "d", "k", "bytes in bf16", *heads)
    for column in table.columns[1:]:
        column.justify = "right"
    for name in sorted(shapes, key=_natural):
        d, k = shapes[name]
        sizes = [f"{payload_bytes([(d, k)], rank, wire):,}" for rank, wire in wires.items()]
        shown = escape(name if name.isprintable() else repr(name))  # no commands to a terminal
        table.add_row(shown, str(d), str(k), f"{2 * d * k:,}", *sizes)
    return table


def _natural(name: str) -> list[tuple[int, str]]:
    """Block 2 before block 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _spans(versions: Sequence[int]) -> str:
    """[0, 1, 2, 6] as "0 to 2, 6"."""
    runs = groupby(enumerate(versions), key=lambda pair: pair[1] - pair[0])
    spans = [[version for _, version in run] for _, run in runs]
    return ", ".join(f"{s[0]} to {s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)


def _say_left_over(console: Console, journal: Journal) -> None:
    for text in journal.dropped:
        console.print(f"torn and left out: {text}", markup=False)
    for path in journal.contents.leftovers:
        console.print(f"not used; the next write removes it: {path}", markup=False)


def _check_policy(journal: Journal, name: str) -> None:
    """Raise `ShapeMismatch` unless each layer of the journal is a matrix of the policy."""
    try:
        from logra_lab.rl.policies import load_policy
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise InputError("--policy needs transformers: pip install 'logra-lab[rl]'") from error
    modules = dict(load_policy(name).model.named_modules())
    for layer, shape in journal.contents.shapes.items():
        weight = getattr(modules.get(layer), "weight", None)
        found = None if weight is None else tuple(weight.shape)
        if found != shape:
            raise ShapeMismatch(
                f"{journal.folder}: layer {layer!r} is {list(shape)}, in policy {name!r} it is "
                f"{'absent' if found is None else list(found)}: a journal of another model"
            )
