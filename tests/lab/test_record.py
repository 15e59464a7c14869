"""`record`, `style` and `presets` outside a runner."""

import json
import math

import matplotlib as mpl
import pytest
import torch

from logra_lab.errors import InputError
from logra_lab.lab import context, record, style
from logra_lab.lab.presets import PRESETS, preset
from logra_lab.lab.report import Result, past_seconds, spell, write_json

mpl.use("agg")


@pytest.fixture(autouse=True)
def interactive(monkeypatch, tmp_path):
    """As in a notebook opened by hand: no hand-over, results under runs/interactive."""
    monkeypatch.delenv(context.VARIABLE, raising=False)
    monkeypatch.setenv("JPY_SESSION_NAME", "some/folder/05_idea.ipynb")
    for module in (record, style):
        monkeypatch.setattr(module, "interactive_folder", lambda: tmp_path)
    monkeypatch.setattr(record, "_artefacts", [])
    return tmp_path


def test_numbers_and_figures_are_written_under_the_notebooks_name(interactive):
    fig, ax = mpl.pyplot.subplots()
    ax.plot([0, 1], [1, 2])
    ax.set(xlabel="step", ylabel="KL (nats per token)")
    style.save(fig, "kl")
    path = record.record({"after": torch.tensor(0.5)}, curve=torch.tensor([1, 2]), name="x")
    assert path == interactive / "records" / "05_idea.json"
    content = json.loads(path.read_text())
    assert content["numbers"] == {"after": 0.5, "curve": [1, 2], "name": "x"}
    assert (path.parent / content["figures"][0]).resolve() == interactive / "figures" / "kl.png"


@pytest.mark.parametrize(
    ("arguments", "more", "message"),
    [
        ([], {}, "no numbers"),
        ([{"a": 1}], {"a": 2}, "'a' is given twice"),
        ([], {"loss": math.inf}, "loss is inf"),
        ([], {"runs": [[1.0, math.nan]]}, r"runs\[0\]\[1\] is nan"),
        ([], {"model": object()}, "model is a object"),
    ],
)
def test_what_is_no_result_is_refused_and_nothing_is_written(interactive, arguments, more, message):
    with pytest.raises(InputError, match=message):
        record.record(*arguments, **more)
    assert not (interactive / "records").exists()


def test_an_axis_without_a_label_is_refused():
    fig, ax = mpl.pyplot.subplots()
    ax.plot([0, 1])
    ax.set_xlabel("step")
    with pytest.raises(InputError, match="axes 0 needs x and y labels"):
        style.save(fig, "bare")
    with pytest.raises(InputError, match="figure name 'a/b'"):
        style.save(fig, "a/b")


def test_saved_figures_are_opaque_also_when_the_reader_asked_for_transparent(interactive):
    with mpl.rc_context({"savefig.transparent": True}):
        style.use_style()
        fig, ax = mpl.pyplot.subplots()
        ax.plot([0, 1])
        ax.set(xlabel="a", ylabel="b")
        path = style.save(fig, "opaque")
    pixels = mpl.image.imread(path)
    assert pixels.shape[2] == 3 or pixels[..., 3].min() == 1.0


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours: WCAG 2.2, "relative luminance" and "contrast ratio"."""

    def luminance(colour: str) -> float:
        channels = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
            for c in mpl.colors.to_rgb(colour)
        ]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), channels, strict=True))

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_text_is_legible_on_the_figures_own_ground():
    # WCAG 2.2 asks for 4.5 between text and its ground.
    style.use_style()
    ground = mpl.rcParams["figure.facecolor"]
    for part in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color"):
        assert contrast(mpl.rcParams[part], ground) >= 4.5


def test_a_band_spans_the_lowest_and_highest_seed_and_its_line_is_the_mean():
    _, ax = mpl.pyplot.subplots()
    style.band(ax, [0, 1], [[0.0, 1.0], [2.0, 3.0], [4.0, 11.0]], label="seeds")
    assert ax.lines[0].get_ydata().tolist() == [2.0, 5.0]
    heights = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (0.0, 11.0)
    with pytest.raises(InputError, match="seed row 1 has 1 values, x has 2"):
        style.band(ax, [0, 1], [[0.0, 1.0], [2.0]], label="short")


def test_presets_are_found_by_name_and_cannot_be_changed():
    assert preset("smoke").steps < preset("laptop").steps
    assert all(name == one.name for name, one in PRESETS.items())
    with pytest.raises(InputError, match="did you mean 'eight_gpu'"):
        preset("eigth_gpu")
    with pytest.raises(AttributeError):
        preset("smoke").steps = 1  # type: ignore[misc]


def test_the_expected_time_comes_from_the_newest_passed_run_of_that_preset(tmp_path):
    runs = {"a": ("smoke", "passed", 7.0), "b": ("laptop", "passed", 90.0)}
    runs["c"] = ("smoke", "failed", 1.0)
    for name, (size, status, seconds) in runs.items():
        run = {"preset": size, "status": status, "seconds": seconds}
        write_json(tmp_path / name / "records" / "01_x.json", {"run": run})
    write_json(tmp_path / "d" / "records" / "01_x.json", {"numbers": {}})
    assert past_seconds(tmp_path, "01_x", "smoke") == 7.0
    assert past_seconds(tmp_path, "01_x", "one_gpu") is None


def test_a_notebook_that_needs_more_than_it_states_gets_a_remark():
    result = Result("01_x", "passed", "", 400.0, 3 * 2**30, takes_s=120.0, needs_bytes=2**30)
    assert result.remark("laptop") == (
        "took 6 min 40 s, it states 2 min 0 s; used more memory than it states (1,024 MiB)"
    )
    assert "took" not in result.remark("smoke")
    assert (spell(4.25), spell(59.6), spell(61)) == ("4.2 s", "60 s", "1 min 1 s")
