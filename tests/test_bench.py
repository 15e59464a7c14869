"""The bench format, its bounds, and the README table made from result files."""

import json
from pathlib import Path

import pytest

from logra_lab import bench
from logra_lab.bench import figure, readme
from logra_lab.errors import InputError


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
