"""What `logra-lab plan` prints: two numbers, the terms behind them, the published beside."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from logra_lab.atomic import check_writable
from logra_lab.errors import InputError
from logra_lab.memory.arch import Arch
from logra_lab.memory.cost import Cost
from logra_lab.memory.models import PRESETS, find
from logra_lab.memory.plan import METHODS, NAMES, Setup, learn, serve
from logra_lab.memory.published import PAPER, rows


def main(model: str, setup: Setup, json_path: str | None) -> int:
    """Plan `model`, a name as `models.find` takes it; tables, or JSON to a file (``-``: stdout).

    Raises `InputError` for an unknown model and for settings that do not fit it.
    """
    check_writable("--json", json_path)
    arch = find(model)
    costs = {method: learn(arch, method, setup) for method in METHODS}
    engine = serve(arch, setup, follow=True)
    if json_path is None:
        _print(arch, setup, costs, engine)
        return 0
    text = json.dumps(_plain(arch, setup, costs, engine), indent=2) + "\n"
    if json_path == "-":
        sys.stdout.write(text)
    else:
        try:
            Path(json_path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"--json {json_path}: {error.strerror}; name another file") from error
    return 0


def _plain(arch: Arch, setup: Setup, costs: dict[str, Cost], engine: Cost) -> dict[str, Any]:
    return {
        "model": arch.name,
        "source": arch.source,
        "parameters": arch.parameters,
        "trained": arch.targets,
        "setup": vars(setup),
        "serve": serve(arch, setup).to_dict(),
        "serve_and_follow": engine.to_dict(),
        "learn": {method: cost.to_dict() for method, cost in costs.items()},
        "published": [{**vars(row), "note": row.explain()} for row in _published(arch)],
    }


def _published(arch: Arch) -> list[Any]:
    known = [arch.name] if PRESETS.get(arch.name) is arch else []
    return [row for row in rows(tuple(known)) if row.published is not None or row.out_of_memory]


def _print(arch: Arch, setup: Setup, costs: dict[str, Cost], engine: Cost) -> None:
    terminal = sys.stdout.isatty()
    console = Console() if terminal else Console(width=100, force_terminal=False, highlight=False)
    plain = serve(arch, setup)
    learned = {NAMES[m]: cost for m, cost in costs.items()}
    scale, unit = (2**30, "GiB") if costs["adam"].bytes >= 2**30 else (2**20, "MiB")
    gpus = "one GPU" if setup.fsdp == 1 else f"{setup.fsdp} GPUs, FSDP"
    console.print(
        f"{arch.name}: {arch.parameters:,} parameters, {arch.targets:,} of them trained\n"
        f"({arch.source})",
        markup=False,
    )
    console.print(f"to serve, on one GPU: {plain.bytes / scale:,.1f} {unit}", markup=False)
    numbers = ", ".join(f"{c.bytes / scale:,.1f} {unit} with {n}" for n, c in learned.items())
    console.print(f"to learn, per GPU:    {numbers}", markup=False)
    console.print(_serve_table(engine, setup, scale, unit))
    console.print(_learn_table(costs, f"to learn, {unit} per GPU: {gpus}", setup, scale))
    for name, cost in learned.items():
        limit = cost.limit
        console.print(f"{name} is limited by: {limit.name}, {limit.why}", markup=False)
    if published := _published(arch):
        console.print(_published_table(published))
        for row in published:
            console.print(f"{row.method}: {row.explain()}", markup=False)
    console.print(
        "Closed form, nothing was run. Range: other kernels, padding, prefetching, an allocator's "
        "share, 1 GiB of context.",
        markup=False,
    )


def _serve_table(cost: Cost, setup: Setup, scale: int, unit: str) -> Table:
    title = f"to serve, {unit} on one GPU: {setup.sequences} sequences of {setup.context} tokens"
    table = Table("term", unit, "how", title=title, title_justify="left")
    table.columns[1].justify = "right"
    for term in cost.terms:
        last = term.name.startswith("float32 copy")
        name = f"to follow a trainer: {term.name}" if last else term.name
        table.add_row(name, f"{term.bytes / scale:,.2f}", term.why)
    return table


def _learn_table(costs: dict[str, Cost], title: str, setup: Setup, scale: int) -> Table:
    how = f"r {setup.rank}, {setup.tokens} tokens, {setup.dtype}"
    how += ", checkpointing" if setup.checkpointing else ", no checkpointing"
    table = Table("term", *(NAMES[m] for m in costs), "when", title=f"{title}; {how}")
    table.title_justify = "left"
    for column in table.columns[1:-1]:
        column.justify = "right"
    names = list(dict.fromkeys(t.name for cost in costs.values() for t in cost.terms))
    for name in names:
        found = [next((t for t in c.terms if t.name == name), None) for c in costs.values()]
        one = next(t for t in found if t is not None)
        when = "on the host" if one.host else ", ".join(one.moments) or "always"
        cells = ["" if t is None else f"{t.bytes / scale:,.2f}" for t in found]
        table.add_row(name, *cells, when)
    table.add_section()
    standing = [sum(t.bytes for t in cost.standing()) / scale for cost in costs.values()]
    table.add_row("stands all the time", *(f"{x:,.2f}" for x in standing), "")
    peaks = {cost.peak for cost in costs.values()}
    totals = [f"{cost.bytes / scale:,.2f}" for cost in costs.values()]
    table.add_row("[bold]at the largest moment[/bold]", *totals, ", ".join(sorted(peaks)))
    ranges = [f"{c.low / scale:,.1f}–{c.high / scale:,.1f}" for c in costs.values()]
    table.add_row("range", *ranges, "")
    return table


def _published_table(published: list[Any]) -> Table:
    title = (
        f"published averages over a run, GiB per GPU, beside ours at rank {PAPER.rank} on "
        f"{PAPER.fsdp} GPUs"
    )
    table = Table("method", "published", "stands", "peak", "range", title=title)
    table.title_justify = "left"
    for row in published:
        span = f"{row.low:.1f}–{row.high:.1f}"
        average = "out of memory" if row.out_of_memory else f"{row.published:.2f}"
        table.add_row(row.method, average, f"{row.standing:.2f}", f"{row.peak:.2f}", span)
    return table
