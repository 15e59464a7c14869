"""Run records: what a run leaves behind when it ends, fails, is stopped, killed or resumed."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from enum import StrEnum
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

import logra_lab.rl.records as records
from logra_lab.errors import InputError
from logra_lab.kernels import VARIABLE
from logra_lab.rl import environment
from logra_lab.rl.export import check_saved
from logra_lab.rl.records import (
    METRICS,
    ExportRefused,
    RecordError,
    RunRecord,
    export_policy,
    read_manifest,
    read_steps,
)

VERIFIER = SimpleNamespace(name="sums", version="3", owner="me", check=None)
CONFIG = {"rank": 32, "rho": 1e-3, "tasks": ["sums"], "budget": {"kind": "annealed"}}


def begin(folder, **changes):
    given = {"config": CONFIG, "seeds": {"run": 7, "draw": 8}, "verifier": VERIFIER, **changes}
    return RunRecord.open(folder, given.pop("config"), **given)


def strict(text: str):
    """Parse as RFC 8259 has it: NaN and Infinity are errors."""

    def refuse(name):
        raise AssertionError(f"not JSON: {name}")

    return json.loads(text, parse_constant=refuse)


# --- manifest -------------------------------------------------------------------------------


def test_the_manifest_says_what_ran_on_what_and_how_it_ended(tmp_path):
    with begin(tmp_path / "run") as record:
        running = read_manifest(tmp_path / "run")
        record.add_evaluation(task="sums", size=64, seed=1, step=0, result={"pass_at_1": 0.25})
    manifest = strict((tmp_path / "run" / "manifest.json").read_text())
    assert (running["status"], manifest["status"], manifest["error"]) == (
        "running",
        "finished",
        None,
    )
    assert running["end"] is None
    assert manifest["start"] <= manifest["end"]
    assert manifest["config"] == CONFIG
    assert manifest["seeds"] == {"run": 7, "draw": 8}
    assert manifest["reward"] == {"name": "sums", "version": "3", "owner": "me"}
    assert manifest["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["versions"]["transformers"] == transformers.__version__
    assert manifest["threads"] == torch.get_num_threads()
    assert manifest["hardware"]["cores"] >= 1
    assert manifest["hardware"]["cpu"]
    assert manifest["wall_seconds"] > 0
    assert manifest["evaluations"] == [
        {"task": "sums", "size": 64, "seed": 1, "step": 0, "result": {"pass_at_1": 0.25}}
    ]


def test_the_manifest_says_whose_kernels_compute_on_the_device_of_the_run(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv(VARIABLE, raising=False)
    seen = []
    for device in ("cpu", "cuda:0"):  # nothing is computed there: a choice needs no GPU
        with begin(tmp_path / device[:3], device=device):
            seen.append(read_manifest(tmp_path / device[:3]))
    assert [(m["device"], m["kernels"]) for m in seen] == [("cpu", "torch"), ("cuda:0", "triton")]
    monkeypatch.setenv(VARIABLE, "torch")  # and again on resuming, where the choice may differ
    with begin(tmp_path / "cud", device="cuda:0", resume_step=0):
        manifest = read_manifest(tmp_path / "cud")
    assert (manifest["device"], manifest["kernels"]) == ("cuda:0", "torch")


@pytest.mark.parametrize(
    ("settings", "by_torch"),
    [
        ({}, []),
        ({"projection": "gaussian", "wire": "float32"}, ["signs", "project", "gram", "apply"]),
        ({"wire": "bfloat16", "trainers": 2}, ["row_adam", "apply"]),
    ],
)
def test_the_manifest_catches_a_run_by_triton_of_which_torch_computes_a_part(
    tmp_path, monkeypatch, settings, by_torch
):
    pytest.importorskip("triton")
    monkeypatch.setenv(VARIABLE, "triton")
    with begin(tmp_path / "run", device="cuda:0", config={**CONFIG, **settings}):
        manifest = read_manifest(tmp_path / "run")
    assert (manifest["kernels"], manifest["by_torch"]) == ("triton", by_torch)


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (KeyboardInterrupt(), "interrupted", None),
        (ValueError("layer 3 is not finite"), "failed", "ValueError: layer 3 is not finite"),
    ],
)
def test_a_run_that_does_not_come_to_its_end_says_so(tmp_path, error, status, text):
    with pytest.raises(type(error)), begin(tmp_path / "run"):
        raise error
    manifest = read_manifest(tmp_path / "run")
    assert (manifest["status"], manifest["error"]) == (status, text)
    assert manifest["end"]


def test_peak_memory_is_in_mib():
    """VmHWM of /proc/self/status is the same high-water mark in KiB (proc_pid_status(5))."""
    if sys.platform != "linux":
        pytest.skip("/proc is Linux's")
    block = np.ones(2**26 // 8)  # 64 MiB
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    # ru_maxrss may be larger: it survives exec, VmHWM does not.
    assert environment.peak_memory_mib() >= int(line.split()[1]) / 1024 * 0.99 > 64
    assert environment.peak_memory_mib() < environment.hardware()["memory_mib"]
    del block


def test_the_commit_is_the_librarys_own_not_that_of_a_repository_around_it(tmp_path):
    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (tmp_path / "other").write_text("")
    git("init", "-q")
    git("add", "other")
    git("commit", "-qm", "x")
    assert environment._commit(package) == (None, None)
    git("add", "package")
    git("commit", "-qm", "y")
    assert environment._commit(package) == (git("rev-parse", "HEAD"), False)
    (package / "__init__.py").write_text("changed")
    assert environment._commit(package) == (git("rev-parse", "HEAD"), True)


def test_an_existing_run_is_not_overwritten(tmp_path):
    with begin(tmp_path / "run") as record:
        record.log(step=1, loss=0.5)
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    with pytest.raises(InputError, match="there is a record already"):
        begin(tmp_path / "run")
    (tmp_path / "run" / "manifest.json").unlink()  # killed between its two first files
    with pytest.raises(InputError, match="there is a record already"):
        begin(tmp_path / "run")
    assert (tmp_path / "run" / "steps.jsonl").read_bytes() == before["steps.jsonl"]


def test_a_configuration_that_is_not_plain_leaves_no_folder(tmp_path):
    with pytest.raises(InputError, match=r"manifest\.config\.policy.*object"):
        begin(tmp_path / "run", config={"policy": object()})
    assert not (tmp_path / "run").exists()


# --- steps ----------------------------------------------------------------------------------


def test_lines_are_strict_json_and_come_back_with_their_non_finite_numbers(tmp_path):
    class Outcome(StrEnum):
        correct = "correct"

    with begin(tmp_path / "run") as record:
        record.log(
            step=1,
            loss=float("nan"),
            ratio_max=float("inf"),
            kl_predicted=-float("inf"),
            baseline=np.float64(0.1),
            tokens=np.int64(2**40),
            sketch_norm=torch.tensor(0.5),
            outcomes={Outcome.correct: 3},
            skipped="NaN",  # text stays text
            warnings=("a\nb", "é"),
            entropy=None,
        )
    (line,) = (tmp_path / "run" / "steps.jsonl").read_text().splitlines()
    raw = strict(line)
    assert (raw["loss"], raw["ratio_max"], raw["kl_predicted"]) == ("NaN", "Infinity", "-Infinity")
    (step,) = read_steps(tmp_path / "run")
    assert step["loss"] != step["loss"]
    assert (step["ratio_max"], step["kl_predicted"]) == (float("inf"), -float("inf"))
    assert (step["baseline"], step["tokens"], step["sketch_norm"]) == (0.1, 2**40, 0.5)
    assert step["outcomes"] == {"correct": 3}
    assert (step["skipped"], step["warnings"], step["entropy"]) == ("NaN", ["a\nb", "é"], None)


def test_a_line_is_in_the_file_when_log_returns(tmp_path):
    """A process killed by SIGKILL right after has its steps, and its manifest says running."""
    script = textwrap.dedent(
        """
        import os, signal, sys
        from types import SimpleNamespace
        from logra_lab.rl.records import RunRecord
        verifier = SimpleNamespace(name="v", version="1", owner="o")
        record = RunRecord.open(sys.argv[1], {}, seeds={}, verifier=verifier)
        record.log(step=1, loss=1.5)
        record.log(step=2, loss=2.5)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    done = subprocess.run(command, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [step["loss"] for step in read_steps(tmp_path / "run")] == [1.5, 2.5]
    assert read_manifest(tmp_path / "run")["status"] == "running"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step": 3, "losss": 1.0}, r"unknown \['losss'\]"),
        ({"step": 3, "loss": object()}, r"metrics\.loss.*object"),
        ({"step": 3, "outcomes": {1: 2}}, r"metrics\.outcomes.*got 1"),
        ({"step": 3, "loss": torch.zeros(2)}, r"metrics\.loss.*Tensor"),
        ({"step": 2}, "step > 2, got 2"),
        ({"loss": 1.0}, "step > 2, got None"),
        ({"step": 3.0}, r"step > 2, got 3\.0"),
    ],
)
def test_a_bad_line_is_refused_and_nothing_is_written(tmp_path, values, message):
    with begin(tmp_path / "run") as record:
        record.log(step=2)
        with pytest.raises(InputError, match=message):
            record.log(**values)
        record.log(step=3)
    assert [step["step"] for step in read_steps(tmp_path / "run")] == [2, 3]


def test_every_metric_has_a_unit_and_a_meaning():
    for name, metric in METRICS.items():
        assert metric.unit, name
        assert len(metric.meaning) > 10, name


def test_a_torn_last_line_is_left_out_wherever_it_was_cut(tmp_path):
    with begin(tmp_path / "run") as record:
        record.log(step=1, warnings=["é{}[]"])
        record.log(step=2, loss=0.25, outcomes={"wrong": 1})
    path = tmp_path / "run" / "steps.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert [step["step"] for step in read_steps(tmp_path / "run")] == [1]
    path.write_bytes(whole[:-1])  # only the line's end is missing: the step is whole
    assert [step["step"] for step in read_steps(tmp_path / "run")] == [1, 2]
    path.write_bytes(whole[:first] + b"\0" * 40)  # what a power cut may leave
    assert [step["step"] for step in read_steps(tmp_path / "run")] == [1]


def test_damage_before_the_end_is_an_error_with_its_line(tmp_path):
    with begin(tmp_path / "run") as record:
        for step in (1, 2, 3):
            record.log(step=step)
    path = tmp_path / "run" / "steps.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:-3], lines[2]]) + "\n")
    with pytest.raises(RecordError, match=r"steps\.jsonl, line 2"):
        read_steps(tmp_path / "run")


def test_a_folder_without_a_record_is_named(tmp_path):
    for read in (read_steps, read_manifest):
        with pytest.raises(InputError, match="not the folder of a run"):
            read(tmp_path)


# --- resuming -------------------------------------------------------------------------------


def test_resuming_cuts_off_what_came_after_the_checkpoint(tmp_path):
    run = tmp_path / "run"
    record = begin(run)
    for step in (1, 2, 3, 4):
        record.log(step=step, loss=float("nan"))
        record.add_evaluation(task="t", size=1, seed=0, step=step, result={})
    record.close("interrupted")
    before = read_manifest(run)
    first_two = (run / "steps.jsonl").read_bytes().splitlines(keepends=True)[:2]
    with open(run / "steps.jsonl", "ab") as file:
        file.write(b'{"step": 5, "lo')  # torn by a kill
    with begin(run, config={**CONFIG, "rank": 64, "steps": 9}, resume_step=2) as record:
        assert (run / "steps.jsonl").read_bytes() == b"".join(first_two)
        record.log(step=3, loss=1.0)
    assert [step["step"] for step in read_steps(run)] == [1, 2, 3]
    manifest = read_manifest(run)
    assert [entry["step"] for entry in manifest["evaluations"]] == [1, 2]
    assert (manifest["status"], manifest["start"]) == ("finished", before["start"])
    assert manifest["config"]["rank"] == 64
    assert manifest["wall_seconds"] > before["wall_seconds"]
    session = manifest["sessions"][1]
    assert session["changed"] == {"rank": [32, 64], "steps": [None, 9]}
    assert (session["after_step"], session["last_step_kept"]) == (2, 2)
    assert session["ended_before"] == "interrupted"


def test_a_resumed_record_does_not_take_a_step_it_already_has(tmp_path):
    with begin(tmp_path / "run") as record:
        record.log(step=1)
    record = begin(tmp_path / "run", resume_step=4)  # a power cut took lines 2 to 4
    assert read_manifest(tmp_path / "run")["sessions"][1]["last_step_kept"] == 1
    with pytest.raises(InputError, match="step > 4"):
        record.log(step=4)
    record.close()


def test_resuming_without_a_record_is_refused(tmp_path):
    with pytest.raises(InputError, match="not the folder of a run"):
        begin(tmp_path / "run", resume_step=3)


# --- refused writes -------------------------------------------------------------------------


def test_a_full_disk_while_logging_leaves_whole_lines(tmp_path):
    """The kernel cuts the write at RLIMIT_FSIZE (setrlimit(2)): half a line, then none."""
    script = textwrap.dedent(
        """
        import resource, sys
        from types import SimpleNamespace
        from logra_lab.rl.records import RecordError, RunRecord, read_steps
        verifier = SimpleNamespace(name="v", version="1", owner="o")
        record = RunRecord.open(sys.argv[1], {}, seeds={}, verifier=verifier)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        record.log(step=1, skipped="x" * 50)
        size = (record.run_dir / "steps.jsonl").stat().st_size
        for text in ("y" * 80, "z" * 80):
            try:
                record.log(step=2, skipped=text)
            except RecordError as error:
                assert "steps.jsonl" in str(error)
            else:
                raise SystemExit("no error")
            assert (record.run_dir / "steps.jsonl").stat().st_size == size
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        record.log(step=2)
        assert [step["step"] for step in read_steps(sys.argv[1])] == [1, 2]
        """
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_full_disk_keeps_the_old_manifest_and_does_not_hide_the_first_error(
    tmp_path, monkeypatch
):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    record = begin(tmp_path / "run")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecordError, match=r"manifest\.json: No space left"):
        record.add_evaluation(task="t", size=1, seed=0, step=0, result={})
    with pytest.raises(ValueError, match="the first") as caught, record:
        raise ValueError("the first")
    assert "No space left" in caught.value.__notes__[0]
    assert read_manifest(tmp_path / "run")["status"] == "running"


# --- export ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy():
    vocabulary = {"<eos>": 0, "a": 1, "b": 2}
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="<eos>")), eos_token="<eos>"
    )
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=3,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return SimpleNamespace(model=transformers.Qwen2ForCausalLM(config), tokenizer=tokenizer)


def test_a_policy_without_an_evaluation_is_not_exported(tmp_path, policy):
    with begin(tmp_path / "run"):
        pass
    with pytest.raises(ExportRefused, match="holds no evaluation"):
        export_policy(tmp_path / "run", policy, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["run"]


@pytest.mark.parametrize("evaluated", [0, 1])
def test_an_earlier_evaluation_does_not_speak_for_the_trained_policy(tmp_path, policy, evaluated):
    """0: before training; 1: a run that Ctrl-C ended between two evaluations."""
    with begin(tmp_path / "run") as record:
        record.log(step=1)
        record.add_evaluation(task="t", size=1, seed=0, step=evaluated, result={})
        record.log(step=2, skipped=None)
        record.log(step=3, skipped="no learning signal")
    with pytest.raises(ExportRefused, match=f"after step {evaluated}, but an update at step 2"):
        export_policy(tmp_path / "run", policy, tmp_path / "out")


def test_steps_that_were_skipped_need_no_further_evaluation(tmp_path, policy):
    with begin(tmp_path / "run") as record:
        record.log(step=1, skipped=None)
        record.add_evaluation(task="t", size=1, seed=0, step=1, result={})
        record.log(step=2, skipped="no learning signal")
    export_policy(tmp_path / "run", policy, tmp_path / "out")


@pytest.fixture
def evaluated(tmp_path):
    with begin(tmp_path / "run") as record:
        record.log(step=1)
        record.add_evaluation(task="t", size=1, seed=0, step=1, result={"pass_at_1": 0.5})
    return tmp_path / "run"


def test_the_exported_folder_loads_to_the_same_bits_and_holds_the_manifest(
    tmp_path, policy, evaluated
):
    out = export_policy(evaluated, policy, tmp_path / "deep" / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("a")["input_ids"] == [1]
    assert read_manifest(out) == read_manifest(evaluated)
    assert os.listdir(tmp_path / "deep") == ["out"]


def test_an_export_that_breaks_off_leaves_nothing(tmp_path, policy, evaluated):
    def full(folder):
        (folder / "tokenizer.json").write_text("{")
        raise OSError(errno.ENOSPC, "No space left on device")

    broken = SimpleNamespace(model=policy.model, tokenizer=SimpleNamespace(save_pretrained=full))
    with pytest.raises(RecordError, match=r"out: No space left"):
        export_policy(evaluated, broken, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_an_export_does_not_write_into_a_folder_with_files(tmp_path, policy, evaluated):
    (tmp_path / "out").mkdir()
    export_policy(evaluated, policy, tmp_path / "out")  # an empty one is fine
    with pytest.raises(InputError, match="it exists"):
        export_policy(evaluated, policy, tmp_path / "out")


def test_the_public_names_are_in_one_place():
    assert all(hasattr(records, name) for name in records.__all__)


@pytest.mark.parametrize(("step", "refused"), [(2, True), (3, False), (4, False), (5, True)])
def test_an_evaluation_does_not_speak_for_a_checkpoint_with_other_weights(tmp_path, step, refused):
    """Evaluated after step 3; step 4 was skipped; step 5 is on disk, but was not logged."""
    (tmp_path / "manifest.json").write_text(json.dumps({"evaluations": [{"step": 3}]}))
    reasons = {1: None, 2: None, 3: None, 4: "the loss is nan"}
    lines = [json.dumps({"step": n, "skipped": reason}) + "\n" for n, reason in reasons.items()]
    (tmp_path / "steps.jsonl").write_text("".join(lines))
    with pytest.raises(ExportRefused, match=f"is of step {step}") if refused else nullcontext():
        check_saved(tmp_path, step)
