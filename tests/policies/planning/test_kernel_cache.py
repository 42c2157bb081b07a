"""Compilation of all kernels ahead of the first plan."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpuenergyd_policies
from gpuenergyd_policies.planning.compiled import IS_COMPILED, Kernel, kernel_files
from gpuenergyd_policies.planning.kernel_cache import compile_kernels, main

ROOT = Path(inspect.getfile(gpuenergyd_policies)).parent
CHECKOUT = Path(__file__).resolve().parents[3]


def called_kernels() -> set[tuple[str, Kernel[..., Any]]]:
    """Return the kernels that other modules call, by name."""
    # A kernel that only other kernels call is part of what they were compiled to.
    of_kernels = {".".join(("gpuenergyd_policies", *p.relative_to(ROOT).with_suffix("").parts)) for p in kernel_files()}
    return {
        (kernel.plain.__name__, kernel)
        for name, module in sys.modules.items()
        if name.startswith("gpuenergyd_policies.planning.") and name not in of_kernels
        for kernel in vars(module).values()
        if isinstance(kernel, Kernel)
    }


@pytest.mark.skipif(not IS_COMPILED, reason="numba is not installed or is disabled")
def test_every_kernel_is_compiled_ahead() -> None:
    compile_kernels()

    called = called_kernels()
    assert len(called) >= 4
    assert [name for name, kernel in called if not kernel.machine_code.signatures] == []


@pytest.mark.skipif(not IS_COMPILED, reason="numba is not installed or is disabled")
def test_loading_the_policy_compiles_every_kernel_so_that_no_plan_waits_for_it() -> None:
    script = (
        "from gpuenergyd.daemon.processes.plugins import load_policy\n"
        "load_policy('bubble-aware')\n"
        "from tests.policies.planning.test_kernel_cache import called_kernels\n"
        "print(sorted(name for name, kernel in called_kernels() if not kernel.machine_code.signatures))"
    )

    loaded = subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, capture_output=True, text=True, check=True)

    assert loaded.stdout == "[]\n"


def test_the_command_says_where_the_compiled_planner_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    assert capsys.readouterr().out.startswith("planner compiled in " if IS_COMPILED else "numba is not")
