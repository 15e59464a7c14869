"""Where the kernels' tests run them: interpreted in a process of their own, and on a GPU."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from logra_lab.kernels import interpreter


class Machine(NamedTuple):
    """`run(function, *arguments)` calls a launcher with tensors on `device`."""

    device: str
    run: Callable[..., Any]


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Calls functions where Triton interprets, which must not be the process of other tests."""
    with interpreter.start() as process:
        yield lambda function, *args, **named: process.submit(function, *args, **named).result()


@pytest.fixture(params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> Machine:
    if request.param == "compiled":
        return Machine("cuda", lambda function, *args, **named: function(*args, **named))
    return Machine("cpu", request.getfixturevalue("interpreted"))


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Compiles a kernel for a GPU that is not here, down to its binary, and returns the PTX.

    The interpreter accepts what the compiler refuses: types, shapes, missing conversions.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # as it is; only the warning goes

    def ptx(kernel: Any, architecture: int, types: dict[str, str], fixed: dict[str, Any]) -> str:
        names = kernel.arg_names
        source = ASTSource(
            fn=kernel,
            signature={n: types.get(n, "constexpr" if n in fixed else "i32") for n in names},
            constexprs={(names.index(n),): value for n, value in fixed.items()},
        )
        return triton.compile(source, target=GPUTarget("cuda", architecture, 32)).asm["ptx"]

    return ptx
