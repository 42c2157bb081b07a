"""Compilation of all kernels ahead of the first plan."""

import importlib
import inspect
from pathlib import Path

import pytest

import gpuenergyd_policies
from gpuenergyd_policies.planning.compiled import IS_COMPILED, kernel_files
from gpuenergyd_policies.planning.kernel_cache import compile_kernels, main

ROOT = Path(inspect.getfile(gpuenergyd_policies)).parent


@pytest.mark.skipif(not IS_COMPILED, reason="numba is not installed or is disabled")
def test_every_kernel_is_compiled_ahead() -> None:
    compile_kernels()

    kernels = [
        (path.stem, name, member)
        for path in kernel_files()
        for name, member in vars(
            importlib.import_module(".".join(("gpuenergyd_policies", *path.relative_to(ROOT).with_suffix("").parts)))
        ).items()
        if hasattr(member, "signatures")
    ]
    assert len(kernels) > 10
    assert [(module, name) for module, name, kernel in kernels if not kernel.signatures] == []


def test_the_command_says_where_the_compiled_planner_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    assert capsys.readouterr().out.startswith("planner compiled in " if IS_COMPILED else "numba is not")
