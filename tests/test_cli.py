"""The command line: exit statuses, one-line errors, and that it starts without torch."""

import subprocess
import sys
from importlib.metadata import version

import pytest

from logra_lab import cli
from logra_lab.errors import InputError, LograError


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
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, said):
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.startswith("logra-lab: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["dance"], ["bench", "everything"], ["course", "--x"]])
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
