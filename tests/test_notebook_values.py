"""What the notebooks record at the smoke preset, against closed forms and the shipped manifest."""

import ast
import json
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")  # before pyplot: the cells that run in this process have no display

import matplotlib.pyplot as plt
import nbformat
import pytest

from logra_lab.lab import shared
from logra_lab.lab.context import Context, write_context
from logra_lab.lab.notebook import read_notebook
from logra_lab.lab.presets import preset

ROOT = Path(__file__).resolve().parents[1]
SMOKE, LAPTOP = preset("smoke"), preset("laptop")
METHODS = ("LoGRA", "Adam", "LoRA")


@pytest.fixture(scope="session")
def one_matrix(recorded: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return recorded("01_one_matrix")


@pytest.fixture(scope="session")
def kernels(recorded: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return recorded("04_kernels")


@pytest.fixture(scope="session")
def sync(recorded: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return recorded("05_sync")


@pytest.fixture(scope="session")
def ppo(recorded: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return recorded("07_ppo")


def test_the_default_layer_is_the_one_whose_gradient_takes_64_mib_and_its_sketch_1_mib() -> None:
    # method.md section 1: 4096 × 4096 at r = 64, float32.
    rank = read_notebook(ROOT / "notebooks" / "01_one_matrix.ipynb").parameters["rank"].default
    assert (LAPTOP.d, LAPTOP.k, rank) == (4096, 4096, 64)
    assert (4 * LAPTOP.d * LAPTOP.k, 4 * LAPTOP.d * rank) == (64 * 2**20, 2**20)


def test_measured_bytes_are_those_of_the_shapes(one_matrix: dict[str, Any]) -> None:
    d, k, n, rank = (one_matrix[name] for name in ("d", "k", "n", "rank"))
    assert (d, k, n) == (SMOKE.d, SMOKE.k, SMOKE.n)
    assert one_matrix["bytes_measured"] == {
        "dense gradient": 4 * d * k,
        "sketch gradient": 4 * d * rank,
        "dense activations": 4 * n * k,  # X and nothing else
        "sketch activations": 4 * n * rank,  # P and nothing else
    }
    assert one_matrix["bytes_predicted"] == one_matrix["bytes_measured"]
    # The dense backward makes G [d, k]; the sketched one makes nothing above the input's gradient.
    assert one_matrix["largest_backward_shape"] == {"dense": [d, k], "sketch": [n, k]}


def test_noise_follows_the_closed_forms_of_signs_and_of_gaussian_entries(
    one_matrix: dict[str, Any],
) -> None:
    k = one_matrix["k"]
    for name, mean in one_matrix["variance"].items():
        kind, rank = name.split()
        expected = {"sign": k - 1, "gaussian": k + 1}[kind] / int(rank)
        # Three standard errors of the mean over the preset's draws.
        assert abs(mean - expected) < 3 * one_matrix["variance_sem"][name], name
    for name, mean in one_matrix["cosine"].items():
        expected = 1 / math.sqrt(1 + (k - 1) / int(name.split()[1]))
        # ‖S‖² varies by about √(2/(d r)) ≤ 5 % a draw, and the form drops terms of that order.
        assert mean == pytest.approx(expected, rel=0.05), name
    # Every sign matrix of the toy once: the identity itself, to float32 rounding.
    assert one_matrix["toy_variance_ratio"] == pytest.approx((3 - 1) / 2, rel=1e-6)


def test_redrawn_sketches_average_out_as_one_over_m(one_matrix: dict[str, Any]) -> None:
    k, rank = one_matrix["k"], one_matrix["rank"]
    assert len(one_matrix["averaged_error"]) == SMOKE.draws
    for m, error in enumerate(one_matrix["averaged_error"], 1):
        # One draw of the error has a spread of about 3 % here (0.042 · √8 / 3.98).
        assert error == pytest.approx((k - 1) / (rank * m), rel=0.1), m


def test_the_sketch_is_g_times_a_transposed(one_matrix: dict[str, Any]) -> None:
    # The project's bound in float32; the notebook prints the rounding estimate beside it.
    assert 0 < one_matrix["relative_error"] < 1e-5


def test_the_interpreted_kernel_gives_the_bits_of_torch_and_stays_inside(
    kernels: dict[str, Any],
) -> None:
    assert kernels["computed_by"] == "torch"  # the other side of the comparison is not the kernel
    assert kernels["by_hand"] == {"signs": True, "first word": True, "last tile": True}
    assert kernels["kernel_equals_torch"] is kernels["served_equal"] is True
    assert kernels["guard_intact"] is True
    wrong = "the same, told to begin at column 0"
    assert {what for what, same in kernels["variants"].items() if not same} == {wrong}
    assert len(kernels["variants"]) == 6
    # The last of 3 × 2 tiles of 16 × 32 on 37 × 50 holds rows 32 to 36 and columns 32 to 49.
    assert kernels["shape"] == [37, 50, 40]
    assert kernels["tile"] == {"exists": 5 * 18, "of": 16 * 32}


def test_bytes_against_flops_of_a_layer_of_the_7b_model(kernels: dict[str, Any]) -> None:
    d, k, r = kernels["big"]
    assert (d, k, r) == (18944, 3584, 256)  # Qwen2.5: arXiv:2412.15115
    assert kernels["flops"] == 2 * d * k * r
    assert kernels["bytes_moved"] == {
        # A and U A written and read, U read, W read and written: float32
        "naive": 4 * (2 * r * k + d * r + 2 * d * k + 2 * d * k),
        "kernel": 4 * 2 * d * k + d * r + d,  # one exponent a row
    }
    # Four inputs a block: of q k v, of o, of gate and up, of down; 28 blocks.
    assert kernels["all_A"] == 4 * r * 28 * (3 * 3584 + 18944)


def test_the_roofline_figure_is_the_result_files_and_says_that_it_is_a_cpu(
    kernels: dict[str, Any],
) -> None:
    result = json.loads((ROOT / "data" / "results" / "kernels.json").read_text())
    assert kernels["from_file"] is True
    assert (kernels["side"], kernels["gpu_numbers"]) == ("cpu", False)
    assert result["machine"]["gpus"] == []
    figures = result["figures"]
    named = {name[4:-9] for name in figures if name.endswith("_roofline")}
    assert kernels["table"].keys() == named
    assert {"signs", "project", "accumulate", "gram", "row_adam", "apply", "kl_token"} < named
    for name, row in kernels["table"].items():
        ms, share = figures[f"cpu_{name}_ms"], figures[f"cpu_{name}_roofline"]
        assert (row["ms"], row["of roofline"]) == (ms["value"], share["value"])
        assert row["GFLOP/s"] == pytest.approx(1e3 * row["GFLOP"] / row["ms"])
    # 2·2048·4096·256 for X Aᵀ, 2·4096·4096·256 for U A
    products = [kernels["table"][name]["GFLOP"] for name in ("project", "apply")]
    assert products == pytest.approx([4.294967296, 8.589934592])


def test_updates_weigh_d_times_r_plus_1_and_a_header(sync: dict[str, Any]) -> None:
    # Rows of q k v o gate up down, from the models' config.json (Qwen2.5: arXiv:2412.15115).
    small = 28 * (1536 + 2 * 256 + 1536 + 2 * 8960 + 1536)
    middle = 28 * (3584 + 2 * 512 + 3584 + 2 * 18944 + 3584)
    mlp, attention = 64 * (2 * 17408 + 5120), 16 * (2 * 6144 + 2 * 1024 + 5120)
    linear = 48 * (2 * 2048 + 6144 + 6144 + 5120)
    rows = {
        "Qwen2.5-1.5B": (small, 7 * 28),
        "Qwen2.5-7B": (middle, 7 * 28),
        "27B": (mlp + attention, 3 * 64 + 4 * 16),
        "27B with linear attention": (mlp + attention + linear, 3 * 64 + 4 * 16 + 3 * 48),
    }
    assert sync["payload_closed"] == {
        f"{name} {r}": d * (r + 1) for name, (d, _) in rows.items() for r in (*SMOKE.ranks, 256)
    }
    assert sync["payload_measured"].keys() >= {f"{n} {r}" for n in rows for r in SMOKE.ranks[:2]}
    for name, size in sync["payload_measured"].items():
        closed, layers = sync["payload_closed"][name], rows[name.rpartition(" ")[0]][1]
        assert closed < size < closed + 256 * layers, name
    # Issue B: near 0.17, 0.36 and 0.75 to 1.0 GB at r = 256, instead of 3.1, 15.2 and 53.8.
    found = [sync["payload_closed"][f"{name} 256"] / 1e9 for name in rows]
    assert found == pytest.approx([0.17, 0.36, 0.75, 1.0], rel=0.03)
    full = [size / 1e9 for size in sync["model_bytes"].values()]
    assert full == pytest.approx([3.1, 15.2, 53.8, 53.8], rel=0.01)
    d, k, r = sync["update"]["shape"]
    assert (d, k, r) == (1024, 1536, 256)
    assert d * (r + 1) < sync["update"]["bytes"] < 1.01 * d * (r + 1) + 256


def test_another_process_rebuilds_the_same_bits_and_another_seed_others(
    sync: dict[str, Any],
) -> None:
    assert sync["rebuilt"] == {
        what: {"same": True, "wrong": False} for what in ("A", "W after the update")
    }
    _, k, r = sync["update"]["shape"]
    # Fair coins: three standard errors of r·k of them.
    shared = sync["signs_shared_with_another_seed"]
    assert shared == pytest.approx(0.5, abs=3 * 0.5 / math.sqrt(r * k))


def test_integer_sums_have_no_order_and_stochastic_rounding_no_bias(sync: dict[str, Any]) -> None:
    # method.md section 4: float factors differ, by a few per cent of the entries, integers nowhere.
    assert sync["order_matters"]["int8"] == 0
    assert 0.01 < sync["order_matters"]["float32"] < 0.2
    rounding = sync["rounding"]
    assert rounding["error"] == pytest.approx(0.015, rel=0.1)  # method.md: 1.5 %
    # The variance of 262,144 roundings is known to 0.2 %, that of their mean to the same.
    assert rounding["error"] == pytest.approx(rounding["predicted"], rel=0.01)
    for m, error in rounding["mean of"].items():
        assert error == pytest.approx(rounding["predicted"] / math.sqrt(int(m)), rel=0.01), m


def test_bfloat16_swallows_steps_as_predicted(sync: dict[str, Any]) -> None:
    assert sync["toy"] == {"plain": 1.0, "exact": 230 / 256}  # 0.9 · 256 = 230.4
    survived = {float(s): pair for s, pair in sync["survival"].items()}
    for s, (predicted, measured) in survived.items():
        # One draw for each of 786,432 weights: a share is known to 0.1 % of the whole.
        assert measured == pytest.approx(predicted, abs=0.005), s
    assert survived[1e-6][1] < 0.05 < 0.95 < survived[1e-3][1]


def test_exact_mode_does_not_drift_and_the_others_do(sync: dict[str, Any]) -> None:
    drift = sync["drift"]
    for name in ("exact, int8 wire", "exact, float32 served"):
        assert set(drift[name].values()) == {0}, name
    plain, both = drift["plain, int8 wire"], drift["plain, bfloat16 wire"]
    # Steps of 3e-4 on weights of 0.05: bfloat16's spacing there is 2.4e-4 and more.
    assert 0.2 < plain["differing"] / sync["weights"] < 0.9
    assert 0.1 < plain["relative_error"] < 1
    assert plain["kl"] > 0
    assert plain["logprob_gap"] > 0
    assert both["relative_error"] == pytest.approx(plain["relative_error"], rel=0.1)
    # A bfloat16 wire loses up to 2⁻⁹ of a factor, which flips few roundings of the cast.
    wire = drift["exact, bfloat16 wire"]
    assert 0 < wire["relative_error"] < plain["relative_error"] / 5
    assert sync["steps"] == SMOKE.steps


def test_the_engine_follows_refuses_and_catches_up(sync: dict[str, Any]) -> None:
    assert sync["equal"] == {"engine": True, "caught up": True, "journal": True}
    assert sync["untouched_by_what_was_refused"] is True
    assert sync["refused"] == {
        "before the first full sync": "NeedsFullSync",
        "one left out": "VersionGap",
        "of another run": "WrongRun",
        "another first update": "DigestMismatch",
    }
    assert sync["gap_worst"] < 1e-4  # float32, four blocks; issue B asks for 0.02


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM, whose prefix cache is at issue")
def test_a_stale_prefix_is_wrong_as_predicted_until_the_reset(sync: dict[str, Any]) -> None:
    assert sync["engine"] == "VLLMEngine"
    skipped, explained, done = sync["stale_gaps"]
    assert skipped > 1e-3  # six updates old
    assert max(explained, done) < 1e-4 < skipped / 10


def test_all_methods_start_from_the_shipped_policy(ppo: dict[str, Any]) -> None:
    shipped = json.loads((ROOT / "data" / "MANIFEST.json").read_text())["small_policy"]["measured"]
    baselines = read_notebook(ROOT / "notebooks" / "07_ppo.ipynb").parameters["baseline_seeds"]
    for number, seed in enumerate(SMOKE.seeds):
        methods = METHODS if number < baselines.default else ("LoGRA",)
        for name in ("accuracy_before", "truncated_before", "length_before"):
            assert len({ppo[name][f"{method} {seed}"] for method in methods}) == 1
        # Three standard errors of a mean over problems: each mean has a spread below 1/2.
        slack = 3 * 0.5 / math.sqrt(SMOKE.eval_problems)
        before = ppo["accuracy_before"][f"LoGRA {seed}"]
        assert before == pytest.approx(shipped["sampled_accuracy"], abs=slack)


def test_a_few_steps_already_help_every_method(ppo: dict[str, Any]) -> None:
    for method in METHODS:
        runs = [run for run in ppo["accuracy_after"] if run.startswith(method + " ")]
        assert len(runs) >= 1
        gained = sum(ppo["accuracy_after"][run] - ppo["accuracy_before"][run] for run in runs)
        # A wrong sign or a dead gradient gives a mean gain at or below 0.
        assert gained > 0, method
    assert ppo["skipped"] == 0
    assert ppo["steps"] == SMOKE.steps


def test_the_governor_keeps_to_its_budget_and_its_cap(ppo: dict[str, Any]) -> None:
    assert ppo["kl_budget"] == [SMOKE.kl_start, SMOKE.kl_end]
    assert sum(ppo["alpha_shares"].values()) == pytest.approx(1, abs=1e-12)
    assert 0 < ppo["alpha_median"] <= 3  # the published cap
    # The prediction is of second order; at these budgets single steps were seen 27 % off.
    assert 0.6 < ppo["kl_ratio_median"] < 1.4


def test_learners_hold_the_bytes_of_the_shipped_policys_shapes(ppo: dict[str, Any]) -> None:
    config = json.loads((ROOT / "data" / "small_policy" / "config.json").read_text())
    hidden, inner, blocks = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    block = [(hidden, hidden)] * 2 + [(kv, hidden)] * 2  # q o, k v
    block += [(inner, hidden)] * 2 + [(hidden, inner)]  # gate up, down
    shapes, r = block * blocks, SMOKE.rank
    expected = {
        "LoGRA": 4 * sum(d * r + d for d, _ in shapes),  # the sketch and one moment a row
        "Adam": 4 * sum(d * k for d, k in shapes) * 3,
        "LoRA": 4 * sum(r * (d + k) for d, k in shapes) * 4,
    }
    assert ppo["bytes_predicted"] == expected
    counters = {"LoGRA": 0, "Adam": len(shapes), "LoRA": 2 * len(shapes)}  # one step count each
    assert ppo["bytes_measured"] == {m: expected[m] + 4 * counters[m] for m in METHODS}


def cells_behind(path: Path, name: str) -> list[str]:
    """The parameters and the code cells that `name` depends on, in order, and no others."""
    needed, chosen = {name}, []
    for cell in reversed(nbformat.read(path, as_version=4).cells):
        if cell.cell_type != "code":
            continue
        nodes = list(ast.walk(ast.parse(cell.source)))
        names = [node for node in nodes if isinstance(node, ast.Name)]
        stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        own = stored | {node.arg for node in nodes if isinstance(node, ast.arg)}
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                stored.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                stored |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        parameters = "parameters" in cell.metadata.get("tags", [])
        if stored & needed or parameters:
            needed = (needed - stored) | ({node.id for node in names} - own)
            chosen.append(cell.source + ('\npreset = "smoke"' if parameters else ""))
    return chosen[::-1]


@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
@pytest.mark.parametrize(
    ("notebook", "moves"),
    [
        ("00_serve_or_learn", [1, 8, 32]),
        ("01_one_matrix", [1, 4, 256]),
        ("02_accumulation", [1, 16, 128]),
        ("03_rowadam", [4, 64]),
        ("04_kernels", [1, 16, 256]),
        ("05_sync", [1, 16, 256]),
        ("06_predicted_kl", [4, 64]),
        ("07_ppo", [SMOKE.kl_start]),
        ("09_memory_plan", [1, 16, 512]),
    ],
)
def test_the_slider_recomputes_and_shows_one_figure(
    notebook: str, moves: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {name: str(tmp_path / name) for name in ("record", "figures", "log", "guard")}
    context = Context(notebook=notebook, token="test", **paths)
    for variable, value in write_context(context, tmp_path / "context.json").items():
        monkeypatch.setenv(variable, value)
    for name in ("RANK", "BUDGET"):  # as in a fresh kernel: nothing chosen yet
        monkeypatch.setattr(shared, name, shared.Quantity(name.lower()))
    space: dict[str, Any] = {}
    for source in cells_behind(ROOT / "notebooks" / f"{notebook}.ipynb", "chooser"):
        exec(source, space)
    plt.close("all")
    control, *others, _, output = space["chooser"].children
    said = []
    for value in moves:
        control.value = value
        shown = [o["data"] for o in output.outputs if "image/png" in o["data"]]
        assert len(shown) == 1
        said.append(output.outputs[0]["data"]["text/markdown"])
        assert str(control.label) in said[-1]  # it says for which value
    for other in others:
        other.index = 0 if other.index else 1
        shown = [o["data"] for o in output.outputs if "image/png" in o["data"]]
        assert len(shown) == 1
        said.append(output.outputs[0]["data"]["text/markdown"])
    assert len(set(said)) == len(moves) + len(others)
    assert plt.get_fignums() == []
