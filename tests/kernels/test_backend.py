"""Which path computes, and that nothing about it needs a GPU, Triton or a variable."""

import os
import subprocess
import sys

import pytest

from logra_lab.errors import InputError, LograError
from logra_lab.kernels import VARIABLE, backend, interpreter


def python(code, **variables):
    env = {k: v for k, v in os.environ.items() if k not in (VARIABLE, "TRITON_INTERPRET")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def test_the_choice_follows_the_device():
    pytest.importorskip("triton")
    assert (backend("cpu"), backend("cuda"), backend("cuda:1")) == ("torch", "triton", "triton")


def test_argument_before_variable_before_device(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv(VARIABLE, "torch")
    assert backend("cuda") == "torch"
    assert backend("cuda", "triton") == "triton"


@pytest.mark.parametrize("name", ["cuda", "Triton"])
def test_an_unknown_choice_is_an_error_not_the_default(monkeypatch, name):
    with pytest.raises(InputError, match=f"{name!r} are unknown.*'triton', 'torch'"):
        backend("cpu", name)
    monkeypatch.setenv(VARIABLE, name)
    with pytest.raises(InputError, match=VARIABLE):
        backend("cpu")


def test_triton_forced_without_a_gpu_is_an_error_not_the_torch_path():
    with pytest.raises(InputError, match=r"cannot run on 'cpu'.*use 'torch'"):
        backend("cpu", "triton")


def test_a_machine_without_triton_computes_with_torch():
    code = "import sys; sys.modules['triton'] = None\n"
    code += "from logra_lab.kernels import backend; print(backend('cpu'), backend('cuda'))"
    assert python(code) == ["torch", "torch"]


def test_choosing_does_not_import_triton_and_kernels_import_without_a_variable():
    pytest.importorskip("triton")
    code = "import sys; from logra_lab.kernels import backend; print(backend('cpu'))\n"
    code += "print('triton' in sys.modules); from logra_lab.kernels import apply, signs"
    assert python(code) == ["torch", "False"]


def test_interpreting_stays_in_its_process(interpreted):
    """This process may hold vLLM's and inductor's kernels, which have to stay compiled ones."""
    triton = pytest.importorskip("triton")
    assert interpreted(backend, "cpu", "triton") == "triton"
    assert interpreted(backend, "cpu") == "torch"  # not chosen unasked: it is 10⁴ times slower
    assert not triton.knobs.runtime.interpret
    assert "TRITON_INTERPRET" not in os.environ


def test_an_interpreter_that_comes_after_triton_is_refused():
    """Triton's own functions would be compiled ones by then: "0 active drivers" at the launch."""
    pytest.importorskip("triton")
    import triton  # noqa: F401

    with pytest.raises(LograError, match="imported triton before"):
        interpreter._interpret()
