"""The bench format, its bounds, and the README table made from result files."""

import json
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from logra_lab import bench
from logra_lab.bench import figure, kernels, naive, readme
from logra_lab.bench.cases import Cases
from logra_lab.bench.roofline import Case, Machine, Part, compare, turns
from logra_lab.errors import InputError
from logra_lab.optimizer import LoGRA


@pytest.mark.parametrize(
    ("value", "bound", "every", "holds"),
    [
        (0.78, "<= 0.78", False, True),
        (0.781, "<= 0.78", False, False),
        ([0.7, 0.77, 0.9], "<= 0.78", False, True),  # the median is held to it
        ([0.7, 0.77, 0.9], "<= 0.78", True, False),  # or every value
        (0.95, "0.95 .. 1.05", False, True),
        (1.06, "0.95 .. 1.05", False, False),
        (float("nan"), "<= 1", False, False),
        (1.0, "< 1", False, False),
    ],
)
def test_bounds_catch_a_comparison_turned_round(value, bound, every, holds):
    assert figure(value, "x", bound, every=every).holds is holds


def test_spread_is_that_of_the_values():
    f = figure([3.0, 1.0, 2.0], "s")
    assert (f.value, f.low, f.high, f.bound, f.holds) == (2.0, 1.0, 3.0, None, None)


def test_quick_probe_bench_writes_the_format_of_the_design(tmp_path):
    out = tmp_path / "probe.json"
    assert bench.main("probe", json_path=str(out), quick=True) == 0
    result = json.loads(out.read_text())
    assert set(result) == {"bench", "quick", "machine", "versions", "figures"}
    assert set(result["figures"]) == {"jvp_vs_fd", "kl_ratio_1e4", "kl_ratio_1e3"}
    for f in result["figures"].values():
        assert set(f) == {"value", "unit", "low", "high", "bound", "holds"}


def test_json_in_a_missing_folder_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(InputError, match="folder does not exist"):
        bench.main("step", json_path=str(tmp_path / "no" / "x.json"), quick=True)
    with pytest.raises(InputError, match="this is a folder"):
        bench.main("step", json_path=str(tmp_path), quick=True)


def closed_forms(sizes):
    """Bytes and FLOPs of each kernel, by hand from the definitions, float32 on a CPU."""
    n, r, V, rows = sizes.tokens, sizes.rank, sizes.vocabulary, sizes.rows
    shapes = [(x.d, x.k) for x in sizes.layers]
    inputs = list(sizes.sites.values())
    d_all = sum(d for d, _ in shapes)
    flat = sizes.blocks * d_all
    return {
        "signs": (sum(4 * r * k for k in inputs), 0),
        "project": (sum(4 * (n * k + n * r) for k in inputs), sum(2 * n * k * r for k in inputs)),
        # H and P read, S read and written
        "accumulate": (sum(4 * n * (d + r) + 8 * d * r for d, _ in shapes), 2 * n * r * d_all),
        # A Aᵀ written at each input; read with D, whose product with it has 2dr²
        "gram": (len(inputs) * 4 * r * r, sum(2 * k * r * r for k in inputs)),
        "squared_norm": (sum(4 * r * r + 4 * d * r for d, _ in shapes), 2 * d_all * r * r),
        "row_adam": (12 * flat * r + 20 * flat, 3 * flat * r),
        # W read and written, int8 factor and exponents read
        "apply": (
            sum(8 * d * k + d * r + d for d, k in shapes),
            sum(2 * d * k * r for d, k in shapes),
        ),
        # and the bfloat16 copy written
        "apply_served": (
            sum(10 * d * k + d * r + d for d, k in shapes),
            sum(2 * d * k * r for d, k in shapes),
        ),
        "kl_variance": (8 * rows * V + 4 * rows, 9 * rows * V),
        "kl_realised": (8 * rows * V + 4 * rows, 12 * rows * V),
        "kl_token": (4 * rows * V + 16 * rows, 5 * rows * V),
    }


def test_quick_kernel_bench_catches_closed_forms_that_are_not_those_of_the_shapes(tmp_path):
    out, threads = tmp_path / "kernels.json", torch.get_num_threads()
    try:
        assert bench.main("kernels", json_path=str(out), quick=True) == 0
    finally:
        torch.set_num_threads(threads)
    figures = json.loads(out.read_text())["figures"]
    for name, (nbytes, flops) in closed_forms(kernels.TINY).items():
        assert figures[f"cpu_{name}_mb"]["value"] == pytest.approx(nbytes / 1e6), name
        assert figures[f"cpu_{name}_gflop"]["value"] == pytest.approx(flops / 1e9), name
        assert figures[f"cpu_{name}_ms"]["value"] > 0
    assert figures["project_cpu"]["bound"] == "<= 1.15"
    assert figures["project_block_mib"]["bound"] == "<= 1.01"


def test_ratios_by_a_clock_that_is_known_catch_a_roofline_upside_down():
    """A machine of 4 bytes and 16 FLOPs a second; launches add up, each with its longer side."""
    said = {"copy": 1.0, "gemm_float32": 1.0, "x ours": 8.0, "x naive": 16.0}
    machine = Machine("cpu", [torch.float32], copied=2, side=2)
    case = Case((Part(8, 16), Part(4, 32)), lambda: None, lambda: None, moved=8)
    names = {arm: name for name, arm in machine.arms.items()}
    names |= {case.ours: "x ours", case.naive: "x naive"}
    clock = lambda arm: said[names[arm]]  # noqa: E731
    figures = compare("gpu", {"x": case}, machine, clock, 3, share=">= 0.7", traffic="<= 1.2")
    # Twice 2 s: 8 bytes at 4 a second take longer than 16 FLOPs at 16, 32 FLOPs than 4 bytes
    assert figures["gpu_x_roofline"].value == (2 + 2) / 8
    assert figures["gpu_x_roofline"].holds is False
    assert figures["gpu_x_naive"].value == 8 / 16
    assert figures["gpu_x_traffic"].value == 8 / (8 / 4)
    assert figures["gpu_copy"].value == 4 / 1e9
    assert figures["gpu_gemm_float32"].value == 16 / 1e9


def test_turns_catch_a_warm_up_that_counts_and_an_order_that_stays():
    seen = []
    arms = {name: lambda name=name: seen.append(name) for name in "ab"}

    def clock(arm):
        arm()
        return float(len(seen))

    assert turns(arms, clock, 2) == {"a": [3.0, 6.0], "b": [4.0, 5.0]}
    assert seen == ["b", "a", "a", "b", "b", "a"]


def test_project_bench_catches_an_A_that_is_held_whole():
    """A of 256 × 4096 in float32 has 4 MiB; a block of it 1 MiB, the bound 1.01."""
    found = kernels.block_bytes(2048, 4096, 256) / 2**20
    assert 1.0 <= found <= 1.01


def test_naive_kl_of_the_bench_is_the_same_quantity():
    cases = Cases(kernels.TINY, "cpu").all()
    for kind in ("variance", "realised", "token"):
        case = cases[f"kl_{kind}"]
        ours, theirs = case.ours(), case.naive()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.flatten(), b.flatten(), rtol=1e-5, atol=1e-6)


def test_naive_logra_takes_the_step_of_logra_given_the_same_projection():
    """Same S, direction and size rule; only the order of float32 sums differs (2⁻²⁴ each)."""

    def model():
        torch.manual_seed(0)
        return nn.Sequential(OrderedDict(o_proj=nn.Linear(48, 40), down_proj=nn.Linear(40, 24)))

    thin, plain = model(), model()
    ours = LoGRA(thin, rank=8, share_inputs=False, update_ratio=1e-2, wire="float32")
    theirs = naive.NaiveLoGRA(plain, 8, rho=1e-2)
    for _ in range(2):  # twice: moments and the emptied sketch count
        theirs.A = {n: x.site.projection.matrix() for n, x in ours.sketch.layers.items()}
        X = torch.randn(30, 48)
        for m in (thin, plain):
            m(X).square().sum().backward()
        before = [p.clone() for p in plain.parameters()]
        assert ours.step().skipped is None
        theirs.step()
        for old, a, b in zip(before, thin.parameters(), plain.parameters(), strict=True):
            # Weights round to 2⁻²⁴ of themselves, twice; a direction to far less than 1e-4.
            assert torch.dist(a, b) <= 1e-4 * torch.dist(b, old) + 2**-23 * old.norm()


def test_arms_of_a_step_train_the_same_matrices(monkeypatch):
    """Each arm moves W by a step of its own size, and its second call starts from the new W."""
    built = []
    find = naive.find_targets
    monkeypatch.setattr(naive, "find_targets", lambda m, t: built.append(find(m, t)) or built[-1])
    arms = naive.arms("cpu", **naive.SMALL)
    targets = {names: len(names) for names in map(tuple, built)}
    assert len(targets) == 1  # of AdamW and of naive LoGRA; LoGRA finds its own the same way
    assert sum(targets.values()) == 7 * naive.SMALL["blocks"]
    states = [{n: m.weight.detach().clone() for n, m in x.items()} for x in built]
    for step in arms.values():
        step()
        step()
    for modules, old in zip(built, states, strict=True):
        for name, module in modules.items():
            assert not torch.equal(module.weight, old[name]), name


def test_step_ratios_are_those_of_one_round():
    seconds = {"logra": [1.0, 3.0, 2.0], "adamw": [2.0, 3.0, 4.0], "naive": [4.0, 3.0, 4.0]}
    figures = kernels.step_ratios(seconds)
    assert figures["gpu_step_vs_adamw"].value == 0.5  # of 1/2, 1, 1/2
    assert figures["gpu_step_vs_naive"].value == 0.5  # of 1/4, 1, 1/2
    assert (figures["gpu_step_adamw"].value, figures["gpu_step_adamw"].unit) == (3.0, "s")


def test_readme_table_is_the_one_of_the_result_files():
    text = (Path(readme.ROOT) / "README.md").read_text()
    assert readme.rendered(text) == text, "run: python -m logra_lab.bench.readme"


def test_results_of_a_quick_run_are_refused(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"bench": "x", "quick": True, "figures": {}}))
    with pytest.raises(InputError, match="--quick"):
        readme.table(tmp_path)


@pytest.mark.slow
def test_bytes_of_a_step_catch_activations_kept_beside_the_sketch():
    """Bound of issue A at rank 64, hidden 1024, 4 layers, 2 x 512 tokens; not timed."""
    from logra_lab.bench.step import _Bench

    arms = _Bench(512, {}).memory_arms(64)
    mib = {name: _Bench(512, {}).mebibytes(arm) for name, arm in arms.items()}
    assert mib["logra"] <= 310
    # AdamW's own part in closed form: gradient and two moments of 4 layers of
    # 4 x 1024² + 3 x 1024 x 4096 weights in float32 = 768 MiB
    assert mib["adamw"] > 768
    assert mib["logra"] < mib["lora"] < mib["adamw"]


@pytest.mark.slow
def test_shipped_policy_catches_a_step_that_does_not_learn():
    """Seed 0 of the default preset: at most 40 % before, at least 85 % after, less truncation."""
    import tempfile

    from logra_lab.lab.presets import preset
    from logra_lab.rl.loop import preset_config, train
    from logra_lab.rl.records import read_steps

    with tempfile.TemporaryDirectory() as folder:
        config = preset_config(preset("laptop"), probe_responses=64)
        _, (before, after) = train(config, Path(folder) / "run")
        steps = read_steps(Path(folder) / "run")
    assert before.pass_at_1 <= 0.40
    assert after.pass_at_1 >= 0.85
    assert after.truncated_share < before.truncated_share
    # No step may leave its budget by prediction; realised KL is measured on every step.
    assert all(s["kl_predicted"] <= s["kl_budget"] * (1 + 1e-9) for s in steps)
    assert all(s["kl_realised"] is not None for s in steps)


@pytest.mark.slow
def test_predicted_kl_catches_a_prediction_that_does_not_come_true():
    """Medians over 30 steps of one seed, in the bands of issue A."""
    from logra_lab.bench import probe

    ratios = probe.ratios(1e-4, steps=30, seeds=(0,))
    assert 0.95 <= sorted(ratios)[len(ratios) // 2] <= 1.05
    ratios = probe.ratios(1e-3, steps=30, seeds=(0,))
    assert 0.85 <= sorted(ratios)[len(ratios) // 2] <= 1.15
