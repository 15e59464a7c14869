"""The command line: exit statuses, one-line errors, and that it starts without torch."""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from logra_lab import cli
from logra_lab.errors import InputError, LograError
from logra_lab.sync.journal import Journal
from logra_lab.sync.sealed import write
from logra_lab.sync.update import ThinUpdate
from logra_lab.sync.wire import ThinLayer


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "logra_lab", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_version_is_that_of_the_package():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"logra-lab {version('logra-lab')}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["course", "--preset", "latpop"], "did you mean 'laptop'?"),
        (["course", "-p", "steps"], "expected NAME=VALUE"),
        (["course", "-p", "a=1", "-p", "a=2"], "given twice"),
        (["course", "--timeout", "0"], "expected more than 0"),
        (["course", "--name", "../up"], "run name"),
        (["course", "--notebooks", "no-such-folder"], "no notebooks"),
        (["train", "--set", "steps"], "expected NAME=VALUE"),
        (["train", "--preset", "smal"], "preset 'smal' is unknown"),
        (["plan", "Qwen2.5-8B"], "did you mean 'Qwen2.5-7B'?"),
        (["plan", "27B", "--rank", "0"], "rank is 0"),
        (["plan", "Qwen2.5-7B", "--rank", "9999"], "at most 3584"),
        (["plan", "27B", "--json", "no-such-folder/x"], "its folder does not exist"),
        (["plan", "27B", "--json", "."], "this is a folder"),
        (["train", "--preset", "smoke", "--run-dir", __file__], "File exists"),
        (["train", "--preset", "smoke", "--run-dir", f"{__file__}/x"], "Not a directory"),
        (["sync", "inspect", "no-such-folder"], "expected a journal's folder"),
        (["sync", "inspect", "no-such.thin"], "No such file"),
        (["sync", "verify", "no-such-folder"], "No such file"),
        (["sync", "verify", "tests"], "no journal here"),
        (["sync", "replay", "no-such-folder", "--out", "x.safetensors"], "No such file"),
        (["sync", "replay", "x", "--out", "no-such-folder/x.safetensors"], "a folder that exists"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, said):
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.startswith("logra-lab: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [[], ["dance"], ["bench", "everything"], ["course", "--x"], ["sync"], ["sync", "replay", "x"]],
)
def test_usage_errors_have_status_2(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: logra-lab" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (InputError("rank is 0;\nexpected 1 or more"), 2, "rank is 0; expected 1 or more"),
        (LograError("the loss is not finite"), 1, "the loss is not finite"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_every_kind_of_error_has_its_status(monkeypatch, capsys, error, status, said):
    def fail(_args):
        raise error

    monkeypatch.setattr(cli, "_course", fail)
    assert cli.main(["course"]) == status
    assert capsys.readouterr().err == f"logra-lab: {said}\n"


def test_an_error_that_is_no_input_error_is_not_hidden(monkeypatch):
    def fail(_args):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_course", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["course"])


# --- plan ------------------------------------------------------------------------------------


def test_a_repeated_only_adds_notebooks_instead_of_replacing_them():
    words = ["course", "--only", "01", "02", "--only", "09"]
    assert cli._parser().parse_args(words).only == ["01", "02", "09"]
    assert cli._parser().parse_args(["course"]).only == []


def test_plan_says_two_numbers_and_writes_the_same_as_json(capsys, tmp_path):
    assert cli.main(["plan", "Qwen2.5-7B"]) == 0
    said = capsys.readouterr().out
    assert cli.main(["plan", "Qwen2.5-7B", "--json", str(tmp_path / "plan.json")]) == 0
    assert cli.main(["plan", "Qwen2.5-7B", "--json"]) == 0
    text = capsys.readouterr().out
    assert text == (tmp_path / "plan.json").read_text()
    plan = json.loads(text)
    assert f"to serve, on one GPU: {plan['serve']['bytes'] / 2**30:.1f} GiB" in said
    for name, method in (("dense Adam", "adam"), ("LoRA", "lora"), ("LoGRA", "logra")):
        cost = plan["learn"][method]
        assert f"{cost['bytes'] / 2**30:.1f} GiB with {name}" in said
        assert f"{name} is limited by: {cost['limit']}" in said
        assert all(term["name"] in said for term in cost["terms"])
    assert [row["published"] for row in plan["published"]] == [31.82, 17.29]
    assert all(row["note"] in " ".join(said.split()) for row in plan["published"])


# --- sync ------------------------------------------------------------------------------------


@pytest.fixture
def journal(tmp_path, monkeypatch):
    """Base 0 and updates 1 to 3 of a model with two layers, 4 × 6 and 8 × 5, at rank 2."""
    monkeypatch.setenv("COLUMNS", "200")
    layers = (ThinLayer("m.up_proj", 4, 6, "m.up_proj"), ThinLayer("m.o_proj", 8, 5, "m.o_proj"))
    generator = torch.Generator().manual_seed(1)
    weights = {x.name: torch.randn(x.d, x.k, generator=generator) for x in layers}
    journal = Journal.create(tmp_path / "j", "run-1", 0, weights)
    for base in range(3):
        U = torch.randn(12, 2, generator=generator)
        journal.append(ThinUpdate.round(U, layers, run="run-1", base=base, seed=5, draw=base + 1))
    return journal


def sync(capsys, *arguments):
    status = cli.main(["sync", *map(str, arguments)])
    said = capsys.readouterr()
    return status, said.out, said.err


def row(text, start):
    """The cells of the first row of a printed table that begins with `start`."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("│┃ ").split("│")]
        if cells[0].startswith(start):
            return cells
    raise AssertionError(f"no row {start!r} in:\n{text}")


def test_inspect_shows_bytes_beside_the_closed_form_and_beside_bfloat16(capsys, journal):
    status, out, _ = sync(capsys, "inspect", journal.folder, "--layers")
    assert status == 0
    assert "journal of run 'run-1', versions 0 to 3" in out
    sizes = {path.name: path.stat().st_size for path in journal.folder.iterdir()}
    assert f"2 layers; {sum(sizes.values()):,} bytes in 4 files" in out
    weights, numbers = 4 * 6 + 8 * 5, (4 + 8) * (2 + 1)  # Σ d·k; Σ d·(r + 1), issue B point 1
    size = sizes["base-00000000.safetensors"]
    extra = f"{100 * (size - 4 * weights) / (4 * weights):+.2f} %"
    share = f"{100 * size / (2 * weights):.2f} %"
    assert row(out, "base") == ["base", "0", "float32", "", f"{size:,}", "256", extra, share]
    size = sizes["00000001.thin"]
    assert sizes["00000003.thin"] == size
    extra = f"{100 * (size - numbers) / numbers:+.2f} %"
    share = f"{100 * size / (2 * weights):.2f} %"
    assert row(out, "3 updates") == [
        *("3 updates", "1 to 3", "int8", "2", f"{size:,}", "36", extra, share)
    ]
    assert row(out, "m.up_proj") == ["m.up_proj", "4", "6", "48", "12"]
    assert row(out, "m.o_proj") == ["m.o_proj", "8", "5", "80", "24"]


def test_layers_are_listed_in_the_order_of_the_model(capsys, tmp_path):
    weights = {f"b.{i}.up_proj": torch.zeros(1, 1) for i in (0, 10, 2)}
    Journal.create(tmp_path, "run-1", 0, weights)
    _, out, _ = sync(capsys, "inspect", tmp_path, "--layers")
    assert out.index("b.0.") < out.index("b.2.") < out.index("b.10.")


def test_inspect_takes_one_file_and_checks_all_of_it(capsys, journal):
    path = journal.folder / "00000002.thin"
    status, out, _ = sync(capsys, "inspect", path)
    assert status == 0
    assert "update from version 1 to 2 (seed 5, draw 2, sign projection, scheme 1)" in out
    assert journal.update(2).digest in out
    status, out, _ = sync(capsys, "inspect", journal.folder / "base-00000000.safetensors")
    assert status == 0
    assert "base at version 0 of run 'run-1', 2 layers" in out
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    status, _, err = sync(capsys, "inspect", path)
    assert (status, err.count("\n")) == (1, 1)
    assert f"{path}: SHA-256 is" in err


def test_verify_says_whole_or_names_the_file(capsys, journal):
    status, out, _ = sync(capsys, "verify", journal.folder)
    assert (status, "whole: run 'run-1', versions 0 to 3, 4 files" in out) == (0, True)
    (journal.folder / "00000004.thin.tmp").write_bytes(b"x")
    status, out, _ = sync(capsys, "verify", journal.folder)
    assert (status, "the next write removes it" in out) == (0, True)
    path = journal.folder / "00000003.thin"
    data = path.read_bytes()
    for damage, said in [
        (data[:-1] + bytes([data[-1] ^ 1]), "byte has changed"),
        (data[:-1], "the journal is whole up to version 2"),
    ]:
        path.write_bytes(damage)
        status, _, err = sync(capsys, "verify", journal.folder)
        assert (status, err.count("\n")) == (1, 1)
        assert path.name in err
        assert said in err
    path.write_bytes(data)
    (journal.folder / "00000002.thin").unlink()
    status, _, err = sync(capsys, "verify", journal.folder)
    assert (status, "00000002.thin is missing" in err) == (1, True)


def test_inspect_says_what_is_torn(capsys, journal):
    path = journal.folder / "00000003.thin"
    path.write_bytes(path.read_bytes()[:-1])
    status, out, _ = sync(capsys, "inspect", journal.folder)
    assert (status, "versions 0 to 2" in out) == (0, True)
    assert f"torn and left out: {path}" in out


def test_verify_compares_layers_with_a_policy(capsys, journal, tmp_path):
    from logra_lab.rl.policies import load_policy

    status, _, err = sync(capsys, "verify", journal.folder, "--policy", "small")
    assert status == 1
    assert "layer 'm.o_proj' is [8, 5], in policy 'small' it is absent" in err
    modules = load_policy("small").model.named_modules()
    weights = {name: m.weight for name, m in modules if name.endswith(("q_proj", "down_proj"))}
    Journal.create(tmp_path / "small", "run-1", 7, weights)
    status, out, _ = sync(capsys, "verify", tmp_path / "small", "--policy", "small")
    assert (status, "fits small" in out) == (0, True)
    name = next(iter(weights))
    Journal.create(tmp_path / "cut", "run-1", 7, {name: weights[name][:-1]})
    status, _, err = sync(capsys, "verify", tmp_path / "cut", "--policy", "small")
    assert (status, f"in policy 'small' it is {list(weights[name].shape)}" in err) == (1, True)
    assert sync(capsys, "verify", tmp_path / "small", "--policy", "no such")[0] == 2


@pytest.mark.parametrize("at", [0, 2, None])
def test_replay_writes_the_keys_of_the_state_dict_whole_and_only_once(capsys, journal, at):
    out = journal.folder.parent / "weights.safetensors"
    version = [] if at is None else ["--version", at]
    status, said, _ = sync(capsys, "replay", journal.folder, *version, "--out", out)
    assert status == 0
    found, expected = journal.weights(3 if at is None else at)
    assert f"2 layers of run 'run-1' at version {found}" in said
    loaded = safetensors.torch.load_file(out)
    assert loaded.keys() == {"m.up_proj.weight", "m.o_proj.weight"}
    for name, weight in expected.items():
        assert torch.equal(loaded[f"{name}.weight"].view(torch.int32), weight.view(torch.int32))
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    (out.parent / "other").touch()
    assert out.stat().st_mode == (out.parent / "other").stat().st_mode  # as the umask has it
    (out.parent / "other").unlink()
    before = out.stat().st_mtime_ns
    status, _, err = sync(capsys, "replay", journal.folder, "--version", 1, "--out", out)
    assert (status, "give --force" in err) == (2, True)
    assert out.stat().st_mtime_ns == before
    assert sync(capsys, "replay", journal.folder, "--version", 1, "--out", out, "--force")[0] == 0
    loaded = safetensors.torch.load_file(out)
    assert torch.equal(loaded["m.o_proj.weight"], journal.weights(1)[1]["m.o_proj"])
    assert sorted(os.listdir(out.parent)) == ["j", "weights.safetensors"]


def test_replay_refuses_bad_versions_and_places_and_leaves_nothing_half_written(
    capsys, journal, monkeypatch
):
    out = journal.folder.parent / "weights.safetensors"
    for arguments, status, said in [
        (["--version", "9", "--out", out], 2, "holds versions 0 to 3"),
        (["--out", journal.folder], 2, "expected a file"),
        (["--out", journal.folder / "base-00000000.safetensors", "--force"], 2, "not the journal"),
    ]:
        code, _, err = sync(capsys, "replay", journal.folder, *arguments)
        assert (code, said in err, err.count("\n")) == (status, True, 1)
    save = safetensors.torch.save_file

    def full(tensors, path, metadata):
        save(tensors, path, metadata)
        with open(path, "rb+") as file:
            file.truncate(50)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    code, _, err = sync(capsys, "replay", journal.folder, "--out", out)
    assert (code, "No space left" in err) == (1, True)
    assert os.listdir(out.parent) == ["j"]
    path = journal.folder / "00000001.thin"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert sync(capsys, "replay", journal.folder, "--version", 3, "--out", out)[0] == 1
    assert os.listdir(out.parent) == ["j"]


def test_inspect_reads_a_header_before_a_file_of_any_size(tmp_path, capsys):
    with open(tmp_path / "sparse.thin", "wb") as file:
        file.truncate(1 << 40)  # more than any memory; zeros that take no room
    status, _, err = sync(capsys, "inspect", tmp_path / "sparse.thin")
    assert (status, "sparse.thin" in err) == (1, True)


@pytest.mark.parametrize("name", ["\ud800", "a\x1b[2Jb", "a\nb"])
def test_layer_names_command_no_terminal(tmp_path, capsys, name):
    layers = [ThinLayer(name, 4, 8, name)]
    update = ThinUpdate.round(
        torch.ones(4, 2), layers, run="r", base=0, seed=0, draw=1, wire="float32"
    )
    (tmp_path / "x.thin").write_bytes(update.to_bytes())
    status, out, _ = sync(capsys, "inspect", tmp_path / "x.thin", "--layers")
    assert (status, repr(name) in out, name in out) == (0, True, False)


@pytest.mark.parametrize("tensors", [{}, {"a": torch.zeros(0, 3)}])
def test_a_base_of_nothing_is_no_base(tmp_path, capsys, tensors):
    meta = {"format": "journal-base-1", "run": "r", "version": 0}
    path = tmp_path / "base-00000000.safetensors"
    write(path, tensors, meta)
    for arguments in (["inspect", path], ["inspect", tmp_path], ["verify", tmp_path]):
        status, _, err = sync(capsys, *arguments)
        assert (status, str(path) in err) == (1, True)


def test_sync_starts_from_the_shell(journal):
    done = run("sync", "verify", str(journal.folder))
    assert (done.returncode, done.stderr) == (0, "")
    assert "whole: run 'run-1'" in done.stdout
