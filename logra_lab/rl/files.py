r"""Math problems from the hub or a local file, in the schema of DAPO-Math-17k or of MATH-500.

* DAPO-Math-17k: columns `prompt` (messages), `reward_model.ground_truth`, `extra_info.index`. The
  prompt is the messages' contents in order, which carry their own instruction.
* MATH-500: columns `problem`, `answer`, `unique_id`, `subject`, `level`. The prompt is the problem
  and the instruction to box the final answer.

Repeated prompts (the hub's DAPO file holds each one about a hundred times) are left to `load_task`,
which keeps the first.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from logra_lab.errors import InputError, LograError
from logra_lab.rl.verifiers import Problem

HUB = {
    "dapo_math": ("BytedTsinghua-SIA/DAPO-Math-17k", "train"),
    "math500": ("HuggingFaceH4/MATH-500", "test"),
}
BOX_INSTRUCTION = "\n\nPut the final answer in \\boxed{}."
COLUMNS = {"DAPO-Math-17k": ("prompt", "reward_model"), "MATH-500": ("problem", "answer")}

Row = dict[str, Any]


def hub_problems(spec: str, seed: int) -> Iterator[Problem]:
    """Problems of a hub dataset in the seed's order. Raises LograError where it cannot be had."""
    import datasets

    name, split = HUB[spec]
    try:
        rows = datasets.load_dataset(name, split=split)
    except OSError as error:  # no network, no such dataset, offline mode
        raise LograError(
            f"task {spec!r}: cannot load {name} from the hub ({type(error).__name__}: {error}); "
            "without a network, give a local copy as jsonl:PATH or parquet:PATH"
        ) from error
    return _problems(rows, rows.column_names, spec, seed)


def file_problems(kind: str, path: str, seed: int) -> Iterator[Problem]:
    """Problems of a local "jsonl" or "parquet" file in the seed's order. Raises InputError."""
    file = Path(path)
    if not file.is_file():
        raise InputError(f"task {kind}:{path}: there is no such file")
    rows = _jsonl(file) if kind == "jsonl" else _parquet(file)
    if not len(rows):
        raise InputError(f"task {kind}:{path}: the file holds no rows")
    # A JSON row may lack a key that others have; the row reader names it then.
    return _problems(rows, list(rows[0]), f"{kind}:{path}", seed)


def _jsonl(file: Path) -> list[Row]:
    lines = enumerate(file.read_bytes().split(b"\n"), 1)
    return [_json_row(line, f"{file}, line {number}") for number, line in lines if line.strip()]


def _json_row(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:  # also bytes that are not UTF-8
        raise InputError(f"{where}: {error}; one JSON object a line") from error
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected a JSON object, got {row!r:.80}")
    return row


def _parquet(file: Path) -> Any:
    import pyarrow.parquet  # type: ignore[import-untyped]
    from datasets import Dataset
    from datasets.table import InMemoryTable

    try:
        table = pyarrow.parquet.read_table(file)
    except (ValueError, OSError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise InputError(f"{file}: not a readable Parquet file ({error})") from error
    return Dataset(InMemoryTable(table))


def _problems(
    rows: Sequence[Row], columns: Sequence[str], where: str, seed: int
) -> Iterator[Problem]:
    reader = _reader(set(columns), where)
    order = list(range(len(rows)))
    random.Random(f"file:{seed}").shuffle(order)
    return (_read(reader, rows[i], i, where) for i in order)


def _reader(columns: set[str], where: str) -> Callable[[Row, int], Problem]:
    missing = {s: [c for c in needed if c not in columns] for s, needed in COLUMNS.items()}
    if not missing["DAPO-Math-17k"]:
        return _dapo_row
    if not missing["MATH-500"]:
        return _math_row
    lacks = "; ".join(f"{schema} needs also {', '.join(m)}" for schema, m in missing.items())
    raise InputError(f"task {where}: columns {sorted(columns)} fit no known schema: {lacks}")


def _read(reader: Callable[[Row, int], Problem], row: Row, index: int, where: str) -> Problem:
    try:
        problem = reader(row, index)
    except (KeyError, TypeError) as error:
        raise InputError(
            f"task {where}: row {index} does not fit the schema ({type(error).__name__}: {error})"
        ) from error
    if not problem.prompt.strip() or not problem.answer.strip():
        raise InputError(f"task {where}: row {index} has an empty prompt or answer")
    return problem


def _dapo_row(row: Row, index: int) -> Problem:
    prompt = "\n\n".join(_text(message["content"]) for message in row["prompt"])
    number = (row.get("extra_info") or {}).get("index", index)
    return Problem(f"dapo_math/{number}", prompt, _text(row["reward_model"]["ground_truth"]))


def _math_row(row: Row, index: int) -> Problem:
    meta = {str(key): row[key] for key in ("subject", "level") if key in row}
    prompt = _text(row["problem"]) + BOX_INSTRUCTION
    return Problem(f"math500/{row.get('unique_id', index)}", prompt, _text(row["answer"]), meta)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r:.80}")
    return value
