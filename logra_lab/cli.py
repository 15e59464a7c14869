"""The `logra-lab` command: `course`, `train`, `export`, `plan`, `sync`, `bench`.

Exit status: 0 done, 1 a run failed, 2 bad input, 130 Ctrl-C. Errors are one line that says what
to do. Whatever a subcommand needs is imported when it runs, so that `--help` is quick.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from logra_lab.errors import InputError, LograError

BENCHES = ("step", "probe", "policy", "llm", "sync", "kernels", "cluster", "faults", "one_gpu")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status."""
    args = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        return command(args)
    except InputError as error:
        return _complain(error, 2)
    except LograError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        print("logra-lab: interrupted", file=sys.stderr)
        return 130


def _complain(error: LograError, status: int) -> int:
    print("logra-lab: " + " ".join(str(error).split()), file=sys.stderr)
    return status


def _version() -> str:
    from importlib.metadata import version

    return version("logra-lab")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="logra-lab", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"logra-lab {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    course = commands.add_parser("course", help="run the notebooks headless")
    course.add_argument("--preset", default="laptop", help="sizes (default: %(default)s)")
    course.add_argument("--name", help="results go to RUNS/NAME (default: the preset's name)")
    course.add_argument(
        "--only", nargs="+", action="extend", default=[], metavar="NN", help="beginnings of names"
    )
    course.add_argument(
        "-p", dest="parameters", action="append", default=[], metavar="NAME=VALUE",
        help="a notebook parameter; may be repeated",
    )  # fmt: skip
    course.add_argument(
        "--timeout", type=float, metavar="S", help="limit of one cell, in seconds (the preset's)"
    )
    course.add_argument("--notebooks", type=Path, metavar="DIR", help="default: notebooks/")
    course.add_argument("--runs", type=Path, metavar="DIR", help="default: runs/")
    course.set_defaults(command=_course)

    train = commands.add_parser("train", help="post-train a policy")
    train.add_argument("--preset", default="laptop", help="sizes (default: %(default)s)")
    train.add_argument(
        "--policy", "--model", metavar="NAME", help="small, smollm2, a folder, or a hub id"
    )
    train.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="records and checkpoints (default: runs/train-PRESET)",
    )
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    train.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="FIELD=VALUE",
        help="a setting of logra_lab/rl/config.py, null for none; may be repeated",
    )  # fmt: skip
    train.set_defaults(command=_train)

    _add_plan(commands)
    export = commands.add_parser("export", help="a trained policy as a Hugging Face folder")
    export.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="of `train`, evaluated")
    export.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="a folder that is new")
    export.set_defaults(command=_export)

    _add_sync(commands)
    bench = commands.add_parser("bench", help="measure, and compare with the stated bounds")
    bench.add_argument("name", choices=BENCHES, metavar="NAME", help=", ".join(BENCHES))
    bench.add_argument("--json", metavar="FILE", help="write the figures there; - for stdout")
    bench.add_argument("--quick", action="store_true", help="small sizes, to try the machinery")
    bench.set_defaults(command=_bench)
    return parser


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser("plan", help="memory to serve and memory to learn, in closed form")
    plan.add_argument(
        "model", metavar="MODEL",
        help="Qwen2.5-1.5B, Qwen2.5-7B, 27B, small, a folder with a config.json, or a hub id",
    )  # fmt: skip
    whole = {"type": int, "metavar": "N"}
    plan.add_argument("--fsdp", **whole, default=4, help="GPUs that train (default: %(default)s)")
    plan.add_argument("--rank", **whole, default=256, help="(default: %(default)s)")
    plan.add_argument("--tokens", **whole, default=4096, help="a microbatch (default: %(default)s)")
    plan.add_argument("--dtype", default="bfloat16", help="bfloat16 (default) or float32")
    plan.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    plan.add_argument("--offload", action="store_true", help="masters and moments on the host")
    plan.add_argument("--sequences", **whole, default=32, help="served at a time (%(default)s)")
    plan.add_argument("--context", **whole, default=4096, help="tokens of each (%(default)s)")
    plan.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write it there, or to stdout"
    )
    plan.set_defaults(command=_plan)


def _add_sync(commands: Any) -> None:
    text = "inspect, verify and replay thin updates and journals"
    actions = commands.add_parser("sync", help=text).add_subparsers(required=True, metavar="ACTION")

    inspect = actions.add_parser("inspect", help="what a journal, an update or a base holds")
    inspect.add_argument("path", type=Path, metavar="PATH", help="a journal's folder, or one file")
    inspect.add_argument("--layers", action="store_true", help="list the layers too")
    inspect.set_defaults(command=_sync, action="inspect")

    verify = actions.add_parser("verify", help="check every byte of a journal, and that none lacks")
    verify.add_argument("folder", type=Path, metavar="FOLDER")
    verify.add_argument(
        "--policy", metavar="NAME", help="a policy whose layers it has to fit: small, a folder, …"
    )
    verify.set_defaults(command=_sync, action="verify")

    replay = actions.add_parser("replay", help="write the weights of one version to a file")
    replay.add_argument("folder", type=Path, metavar="FOLDER")
    replay.add_argument("--version", type=int, metavar="N", help="default: the last")
    replay.add_argument(
        "--out", type=Path, required=True, metavar="FILE",
        help="a safetensors file, float32, with the keys of the model's state dict",
    )  # fmt: skip
    replay.add_argument("--force", action="store_true", help="replace FILE if it exists")
    replay.set_defaults(command=_sync, action="replay")


def parse_pairs(pairs: Sequence[str], option: str) -> dict[str, str]:
    """`["a=1", "b=x"]` as a mapping.

    Raises: InputError for an entry without `=` or a name given twice.
    """
    values: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InputError(f"{option} {pair!r}: expected NAME=VALUE")
        if name in values:
            raise InputError(f"{option} {name!r} is given twice")
        values[name] = value
    return values


def _course(args: argparse.Namespace) -> int:
    texts = parse_pairs(args.parameters, "-p")
    try:
        from logra_lab.lab.course import prepare, run_course
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("logra_lab"):  # not the user's installation
            raise
        raise InputError(
            f"the course needs {error.name}: pip install 'logra-lab[lab,rl]'"
        ) from error
    from logra_lab.lab.context import project_root
    from logra_lab.lab.presets import preset

    folder = args.notebooks or project_root() / "notebooks"
    runs = args.runs or project_root() / "runs"
    plan = prepare(
        folder,
        runs,
        preset=args.preset,
        name=args.name,
        only=args.only,
        texts=texts,
        limit_s=60 * preset(args.preset).cell_minutes if args.timeout is None else args.timeout,
    )
    return run_course(plan)


def _train(args: argparse.Namespace) -> int:
    from logra_lab.lab.presets import preset

    settings = parse_pairs(args.settings, "--set")
    chosen = preset(args.preset)
    from logra_lab.rl import command

    return command.main(
        chosen,
        policy=args.policy,
        run_dir=args.run_dir,
        resume=args.resume,
        settings=settings,
    )


def _plan(args: argparse.Namespace) -> int:
    try:
        from logra_lab.memory import cli
    except ModuleNotFoundError as error:
        if error.name != "rich":
            raise
        raise InputError("logra-lab plan needs rich: pip install 'logra-lab[lab]'") from error
    from logra_lab.memory.plan import Setup

    setup = Setup(
        rank=args.rank,
        fsdp=args.fsdp,
        tokens=args.tokens,
        dtype=args.dtype,
        checkpointing=not args.no_checkpointing,
        offload=args.offload,
        sequences=args.sequences,
        context=args.context,
    )
    return cli.main(args.model, setup, args.json)


def _export(args: argparse.Namespace) -> int:
    from logra_lab.rl import export

    export.check_evaluated(args.run_dir)  # before anything is loaded
    policy = export.trained_policy(args.run_dir)
    print(f"exported to {export.export_policy(args.run_dir, policy, args.out_dir)}")
    return 0


def _sync(args: argparse.Namespace) -> int:
    try:
        from logra_lab.sync import cli
    except ModuleNotFoundError as error:
        if error.name != "rich":
            raise
        raise InputError("logra-lab sync needs rich: pip install 'logra-lab[lab]'") from error
    actions: dict[str, Callable[[], None]] = {
        "inspect": lambda: cli.inspect(args.path, layers=args.layers),
        "verify": lambda: cli.verify(args.folder, policy=args.policy),
        "replay": lambda: cli.replay(args.folder, args.version, args.out, force=args.force),
    }
    actions[args.action]()
    return 0


def _bench(args: argparse.Namespace) -> int:
    from logra_lab import bench

    return bench.main(args.name, json_path=args.json, quick=args.quick)
