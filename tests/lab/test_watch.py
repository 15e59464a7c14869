"""The view of a run from its files: alive, over, killed, torn; words, figure and widget."""

import json
import os
import re

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

from logra_lab.errors import LograError
from logra_lab.lab import launch, watching
from logra_lab.lab.launch import LOG
from logra_lab.lab.watch import draw, look, until
from logra_lab.lab.watching import Watch
from logra_lab.rl import overview
from logra_lab.rl.owner import Owner, mark
from logra_lab.rl.records import RecordError

LIMIT_S = 20
NOW = 4e9  # long after this process began


def line(step, **more):
    return {
        "step": step,
        "accuracy": 0.5,
        "truncated_share": 0.1,
        "response_tokens_mean": 10.0,
        "outcomes": {"correct": 16, "wrong": 14, "error": 2},
        "kl_predicted": 1e-3,
        "kl_realised": 9e-4,
        "kl_budget": 2e-3,
        "seconds_generate": 4.0,
        "seconds_score": 1.0,
        "seconds_train": 2.0,
        "seconds_update": 2.0,
        "seconds_sync": 0.5,
        "seconds_step": 10.0,
        "peak_memory_mib": 500.0,
        "staleness": 0,
        "engine_version": step - 1,
        "version": step,
        "skipped": None,
        "warnings": [],
        **more,
    }


def engines(seconds=10.0, faults=(), restarts=0, redone=0, idle=(0.2, 0.4), lost=False):
    return {
        "seconds": seconds,
        "faults": list(faults),
        "restarts": restarts,
        "pieces_redone": redone,
        "engines": [
            {
                "engine": i,
                "version": 3,
                "idle_share": share,
                "host_mib": 600.0 + i,
                "gpu_mib": None,
                "lost": lost and i == 1,
            }
            for i, share in enumerate(idle)
        ],
    }


@pytest.fixture
def run(tmp_path):
    """Writes the records of a run of 20 steps, as of one second before NOW."""

    def write(*lines, status="running", error=None, torn="", age=1.0):
        manifest = {
            "status": status,
            "error": error,
            "config": {"steps": 20},
            "versions": {"logra_lab": "0.1.0", "torch": "2.13.0"},
            "device": "cpu",
        }
        text = "".join(json.dumps(x) + "\n" for x in lines) + torn
        for name, content in (("steps.jsonl", text), ("manifest.json", json.dumps(manifest))):
            (tmp_path / "new").write_text(content)
            os.utime(tmp_path / "new", (NOW - age, NOW - age))
            (tmp_path / "new").replace(tmp_path / name)
        return tmp_path

    return write


def alive(folder, yes=True):
    mine = Owner.of(os.getpid())
    mark(folder, Owner(mine.pid, mine.began if yes else mine.began - 60, mine.host))


def said(folder):
    return look(folder, now=NOW).status


def test_the_split_adds_up_to_the_step_and_a_skipped_step_counts_as_time(run):
    skipped = line(2, skipped="the loss is nan", seconds_sync=None, seconds_step=8.0)
    del skipped["seconds_update"]
    found = overview.split([line(1), skipped])
    by_hand = {"generate": 8, "score": 2, "train": 4, "update": 2, "sync": 0.5, "other": 1.5}
    assert found == pytest.approx(by_hand)
    assert sum(overview.shares([line(1), skipped]).values()) == pytest.approx(1)
    # All responses, the ones without a verdict too: 2 steps of 32 rows of 10 tokens in 18 s.
    assert overview.rate([line(1), skipped]) == pytest.approx(640 / 18)
    assert overview.troubles([line(1), skipped]) == [(2, "skipped: the loss is nan")]


def test_idle_is_weighted_by_time_and_a_start_does_not_count_where_there_are_steps():
    start = line(1, engines=engines(seconds=90.0, idle=(0.99, 0.99)))
    lines = [start, line(2, engines=engines(10.0, idle=(0.2, 0.4)))]
    lines.append(line(3, seconds_step=30.0, engines=engines(30.0, idle=(0.6, 0.0))))
    assert overview.idle(lines) == pytest.approx({0: (2 + 18) / 40, 1: 4 / 40})
    assert overview.idle([start]) == pytest.approx({0: 0.99, 1: 0.99})
    assert overview.idle([line(1)]) == {}


def test_time_left_follows_the_last_ten_steps_not_the_first():
    lines = [line(i, seconds_step=100.0) for i in range(1, 4)]
    lines += [line(i, seconds_step=10.0) for i in range(4, 15)]
    assert overview.seconds_left(lines, 20) == pytest.approx(60)
    assert overview.seconds_left([], 20) is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (3599.6, "1 h 0 min"),
        (8000, "2 h 13 min"),
    ],
)
def test_durations_round_over_into_the_next_unit(seconds, words):
    assert overview.duration(seconds) == words


def test_memory_is_the_largest_ever_by_owner_and_none_is_not_zero():
    ranks = [{"host_mib": 700.0, "gpu_mib": 40_000.0}, {"host_mib": 900.0, "gpu_mib": None}]
    found = overview.memory([line(1, engines=engines(), trainers=ranks), line(2)])
    expected = {"loop": 500, "trainer": 900, "trainer, GPU": 40_000, "engine": 601}
    assert found == pytest.approx(expected)


def test_a_run_under_way_says_how_far_it_is_and_how_long_it_takes(run):
    folder = run(line(1), line(2))
    alive(folder)
    assert said(folder) == "step 2 of 20, running, 3 min 0 s left"
    assert not look(folder).over


def test_a_killed_run_is_told_from_a_slow_one_by_its_process(run):
    folder = run(line(1), line(2), age=95)
    alive(folder)
    assert (
        said(folder) == "step 2 of 20, no line for 1 min 35 s, where a step takes 10 s: see its log"
    )
    alive(folder, yes=False)
    words = "step 2 of 20, no line for 1 min 35 s, and its process is gone: it was killed; --resume"
    assert said(folder).startswith(words)
    assert look(folder).over


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        ("finished", None, "finished at step 1 of 20"),
        ("interrupted", None, "interrupted at step 1 of 20"),
        ("failed", "TrainersLost: trainer 1 ended", "failed at step 1 of 20: TrainersLost: tr"),
    ],
)
def test_a_run_that_ended_says_how(run, status, error, words):
    folder = run(line(1), status=status, error=error)
    assert said(folder).startswith(words)
    assert look(folder).over


def test_records_of_an_earlier_process_are_not_taken_for_those_of_the_one_that_resumes(run):
    folder = run(line(1), status="interrupted", age=NOW)  # 1970
    alive(folder)
    assert said(folder) == "starting again after step 1 of 20"
    assert not look(folder).over


def test_before_the_first_record_the_log_is_all_there_is(tmp_path):
    assert said(tmp_path) == "nothing here yet"
    assert said(tmp_path / "typo") == "there is no such folder yet"
    (tmp_path / LOG).write_text("starting 2 trainers\nlogra-lab: the cluster has 0 GPUs\n")
    assert said(tmp_path) == "ended before its first record"
    assert ("its log", "logra-lab: the cluster has 0 GPUs") in look(tmp_path).rows()
    alive(tmp_path)
    assert said(tmp_path) == "starting: no record yet"


def test_a_torn_last_line_is_left_out_and_damage_before_it_is_not(run):
    folder = run(line(1), line(2), torn='{"step": 3, "accur')
    assert [x["step"] for x in look(folder).lines] == [1, 2]
    folder = run(line(1), torn='{"step": 2, "ac\n' + json.dumps(line(3)) + "\n")
    with pytest.raises(RecordError, match="line 2"):
        look(folder)


def test_waiting_ends_with_what_was_waited_for_the_run_or_the_time(run, tmp_path):
    folder = run(line(1), line(2))
    alive(folder)
    assert len(until(folder, lambda seen: len(seen.lines) == 2, LIMIT_S).lines) == 2
    assert len(until(folder, lambda seen: False, 0.0).lines) == 2
    alive(folder, yes=False)
    assert until(folder, lambda seen: False, LIMIT_S).over
    (folder / LOG).write_text("logra-lab: this machine has 0 GPUs\n")
    for name in ("manifest.json", "steps.jsonl"):
        (folder / name).unlink()
    with pytest.raises(LograError, match=r"ended before its first record; .*has 0 GPUs"):
        until(folder, lambda seen: False, LIMIT_S)


def test_faults_versions_and_staleness_are_told(run):
    fault = "engine 1: died in 'generate'"
    mended = engines(faults=[fault], restarts=1, redone=3, lost=True)
    folder = run(line(4, engines=mended, staleness=1, warnings=["no learning signal"]))
    rows = look(folder, now=NOW).rows()
    assert ("at step 4", fault) in rows
    assert ("at step 4", "no learning signal") in rows
    by_name = dict(rows)
    assert by_name["mended"] == "1 engine restarts, 3 pieces generated again"
    assert by_name["staleness"] == "at most 1 updates"
    held = "version 4; engine 0 at 3, engine 1 lost; the batch was generated by version 3"
    assert by_name["weights"] == held
    assert by_name["idle"] == "engine 0 20%, engine 1 40%"


def test_what_others_wrote_cannot_become_markup(run):
    folder = run(line(1, warnings=["<script>alert(1)</script>"]))
    assert "<script>" not in look(folder).html()
    assert "&lt;script&gt;" in look(folder).html()


def test_the_figure_stacks_the_phases_to_the_step_and_marks_a_restart(run):
    folder = run(line(1, engines=engines()), line(2, engines=engines(restarts=1)))
    figure = draw(look(folder), Figure())
    learns, kl, time, waits = figure.axes
    tops = {round(p.get_x() + p.get_width() / 2): p.get_y() + p.get_height() for p in time.patches}
    assert tops == pytest.approx({1: 10.0, 2: 10.0})  # the last drawn, "other", is on top
    assert [x.get_xdata()[0] for x in waits.lines if x.get_linestyle() == ":"] == [2]
    assert {x.get_label() for x in waits.lines} >= {"engine 0", "engine 1"}
    assert all(ax.get_xlabel() and ax.get_ylabel() for ax in figure.axes)
    assert kl.get_yscale() == "log"
    assert learns.get_ylim()[1] > 1


def images(watch):
    return [o for o in watch.output.outputs if "image/png" in o.get("data", {})]


def test_the_widget_holds_one_picture_however_often_it_looks_and_draws_only_new_steps(
    run, monkeypatch
):
    folder, before = run(line(1)), plt.get_fignums()
    drawn = []
    monkeypatch.setattr(watching, "draw", lambda seen, figure: drawn.append(1) or figure)
    watch = Watch(folder, threaded=False)
    for step in range(2, 22):
        run(*[line(i) for i in range(1, step)])
        watch.again.click()
    assert len(images(watch)) == 1
    assert len(drawn) == 20
    assert plt.get_fignums() == before
    watch.again.click()
    assert len(drawn) == 20


def test_the_widget_renews_itself_and_ends_with_the_run(run):
    folder = run(line(1))
    alive(folder)
    watch = Watch(folder, every=0.01, threaded=True)
    assert not watch.button.disabled
    run(line(1), line(2))
    (folder / "process.json").unlink()
    run(line(1), line(2), status="finished")
    watch._thread.join(LIMIT_S)
    assert not watch._thread.is_alive()
    assert "finished at step 2 of 20" in watch.table.value
    assert "the run has ended" in watch.said.value
    assert watch.button.disabled


def test_a_second_widget_ends_the_first_ones_thread_and_the_run_goes_on(run):
    folder = run(line(1))
    alive(folder)
    first = Watch(folder, every=0.01, threaded=True)
    second = Watch(folder, every=0.01, threaded=True)
    assert not first._thread.is_alive()
    assert second._thread.is_alive()
    second.close()
    assert not second._thread.is_alive()
    assert look(folder).alive


def test_stop_asks_the_run_and_says_so_without_waiting(run, monkeypatch):
    folder = run(line(1))
    alive(folder)
    asked = []
    monkeypatch.setattr(launch, "stop", lambda folder, limit_s: asked.append((folder, limit_s)))
    watch = Watch(folder, threaded=False)
    watch.button.click()
    assert asked == [(folder, 0)]
    assert re.search("asked to stop", watch.said.value)
    assert watch.button.disabled


def test_damage_in_the_records_is_shown_by_the_thread_and_not_lost(run):
    folder = run(line(1))
    alive(folder)
    watch = Watch(folder, every=0.01, threaded=True)
    run(line(1), torn="{\n" + json.dumps(line(3)) + "\n")
    watch._thread.join(LIMIT_S)
    shown = [o for o in watch.output.outputs if o["output_type"] == "error"]
    assert shown
    assert "line 2" in shown[0]["evalue"]
