"""Compilation of all kernels ahead of the first plan."""

import inspect
import sys
from pathlib import Path

import pytest

import gpuenergyd_policies
from gpuenergyd_policies.planning.compiled import IS_COMPILED, kernel_files
from gpuenergyd_policies.planning.kernel_cache import compile_kernels, main

ROOT = Path(inspect.getfile(gpuenergyd_policies)).parent


@pytest.mark.skipif(not IS_COMPILED, reason="numba is not installed or is disabled")
def test_every_kernel_is_compiled_ahead() -> None:
    compile_kernels()

    # A kernel that only other kernels call is part of what they were compiled to.
    of_kernels = {".".join(("gpuenergyd_policies", *p.relative_to(ROOT).with_suffix("").parts)) for p in kernel_files()}
    called = {
        (kernel.__name__, kernel)
        for name, module in sys.modules.items()
        if name.startswith("gpuenergyd_policies.planning.") and name not in of_kernels
        for kernel in vars(module).values()
        if hasattr(kernel, "signatures")
    }
    assert len(called) >= 4
    assert [name for name, kernel in called if not kernel.signatures] == []


def test_the_command_says_where_the_compiled_planner_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    assert capsys.readouterr().out.startswith("planner compiled in " if IS_COMPILED else "numba is not")
