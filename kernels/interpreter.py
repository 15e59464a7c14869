"""A process in which Triton's kernels run on the CPU: to test and to explain them without a GPU.

Triton reads TRITON_INTERPRET when a function is decorated, its own library's functions included,
so the variable has to be there before `import triton` and then holds for the whole process.
Setting it in a process that also compiles kernels (inductor's, vLLM's) would turn those into
interpreted ones. Hence a process of its own.
"""

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from logra_lab.errors import LograError


def start() -> ProcessPoolExecutor:
    """One process with interpreted kernels: ``start().submit(apply.launch, W, …).result()``.

    Tensors travel in shared memory, so that the kernel writes in place what the caller sees. A
    script that starts one needs the usual ``if __name__ == "__main__"``. Cost: importing torch once
    (seconds); an interpreted kernel is about 10⁴ times slower than a compiled one.
    """
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_interpret)


def _interpret() -> None:
    if "triton" in sys.modules:
        raise LograError(
            "the interpreter's process had imported triton before it began: the main module of "
            "the program imports it; move that import below `if __name__ == '__main__'`"
        )
    os.environ["TRITON_INTERPRET"] = "1"
