"""Compilation of kernels: numba's options, the kind of sequences, and the cache folder."""

import ast
import inspect
import os
import subprocess
import sys
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpuenergyd_policies
from gpuenergyd_policies.planning import compiled, kernel_cache
from gpuenergyd_policies.planning.compiled import IS_COMPILED, NO_CACHE_FOLDER, Kernel, kernel_files
from gpuenergyd_policies.planning.kernel_cache import compile_kernels, main
from tests.support.waiting import LIMIT_S

ROOT = Path(inspect.getfile(gpuenergyd_policies)).parent
CHECKOUT = Path(__file__).resolve().parents[3]
OF_PLUGIN = tuple(CHECKOUT.glob("plugins/gpuenergyd_plan/*/*kernels.py"))


def _doubled(value: int) -> int:
    return 2 * value


@pytest.fixture
def njit_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, bool], str]]:
    """Replace numba by a fake that records the options and the cache folder of each call of njit."""
    calls: list[tuple[dict[str, bool], str]] = []
    numba = SimpleNamespace(config=SimpleNamespace(CACHE_DIR="as before"))

    def njit(**options: bool) -> object:
        calls.append((options, numba.config.CACHE_DIR))
        return lambda kernel: lambda value: kernel(value) + 0.5

    numba.njit = njit
    monkeypatch.setattr(compiled, "_numba", lambda: numba)
    monkeypatch.setattr(compiled, "IS_COMPILED", True)
    return calls


def test_a_kernel_is_cached_on_disk_inlined_and_releases_the_interpreter_lock(
    njit_calls: list[tuple[dict[str, bool], str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compiled, "_is_plain", ContextVar("is_plain", default=False))
    kernel = compiled.compiled(_doubled)

    assert [kernel(21), kernel(1)] == [42.5, 2.5]
    assert njit_calls == [({"cache": True, "nogil": True, "forceinline": True}, str(tmp_path))]
    assert compiled._numba().config.CACHE_DIR == "as before"


def test_a_kernel_is_compiled_in_memory_without_a_cache_folder(
    njit_calls: list[tuple[dict[str, bool], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "cache_folder", lambda: None)
    monkeypatch.setattr(compiled, "_is_plain", ContextVar("is_plain", default=False))

    assert compiled.compiled(_doubled)(21) == 42.5
    assert njit_calls == [({"nogil": True, "forceinline": True}, "as before")]


def test_a_kernel_runs_as_plain_python_where_that_is_quicker(njit_calls: list[tuple[dict[str, bool], str]]) -> None:
    kernel = compiled.compiled(_doubled)

    with compiled.plain_python():
        assert kernel(21) == 42
        with compiled.plain_python(is_quicker=False):
            assert kernel(21) == 42
    assert njit_calls == []


def test_a_kernel_stays_plain_python_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "IS_COMPILED", False)

    assert compiled.compiled(_doubled) is _doubled


def test_plain_kernels_get_lists() -> None:
    with compiled.plain_python():
        assert (compiled.ints([1.0, 2.0]), compiled.floats([1, 2])) == ([1, 2], [1.0, 2.0])
        assert [type(v) for v in (compiled.ints([1.0])[0], compiled.floats([1])[0])] == [int, float]


def test_compiled_kernels_get_contiguous_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_is_plain", ContextVar("is_plain", default=False))
    every_other = np.arange(6)[::2]

    cases: list[tuple[Any, type]] = [(compiled.ints(every_other), np.int64), (compiled.floats(every_other), np.float64)]
    for array, dtype in cases:
        assert isinstance(array, np.ndarray)
        assert (array.dtype, array.tolist()) == (dtype, [0, 2, 4])
        assert array.flags.c_contiguous


def test_the_cache_folder_is_beside_the_code_or_in_the_users_cache_or_in_numba_cache_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "code" / "compiled.py"))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "compiled.py").write_text("one")
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    find = compiled.cache_folder.__wrapped__

    beside = find()
    (tmp_path / "code" / "__pycache__").rename(tmp_path / "gone")
    (tmp_path / "code" / "__pycache__").touch()  # a file: nothing can be written below
    of_user = find()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    by_numba = find()

    assert beside is not None
    assert by_numba is not None
    assert [beside, of_user, by_numba] == [
        tmp_path / parent / beside.name for parent in ("code/__pycache__", "user/gpuenergyd", "numba")
    ]
    assert beside.name.startswith("kernels-")
    assert len(beside.name) == len("kernels-") + 16
    assert by_numba.is_dir()
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert compiled._user_cache_folder() == Path.home() / ".cache" / "gpuenergyd"


def test_kernels_are_compiled_if_numba_is_installed_and_not_disabled() -> None:
    assert compiled.IS_COMPILED is not bool(compiled._numba().config.DISABLE_JIT)


def test_kernels_compile_without_a_writable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(compiled, "cache_folder", compiled.cache_folder.__wrapped__)

    def doubled(value: int) -> int:
        return 2 * value

    assert compiled.cache_folder() is None
    assert compiled.compiled(doubled)(21) == 42


COMPILES_A_KERNEL = """
from gpuenergyd_policies.planning.compiled import COMPILE_CLOCK
from kernel import quadrupled
print(quadrupled(3), COMPILE_CLOCK.cpu_s > 0)
"""
KERNEL = """
from gpuenergyd_policies.planning.compiled import compiled

@compiled
def doubled(value): return 2 * value

@compiled
def quadrupled(value): return doubled(doubled(value))
"""


@pytest.mark.thorough
@pytest.mark.skipif(not compiled.IS_COMPILED, reason="numba is not installed or is disabled")
def test_compiling_is_announced_and_timed_once_and_only_where_nothing_is_cached(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    nowhere = tmp_path / "file"
    nowhere.touch()

    def run(cache: Path) -> tuple[str, str]:
        python_path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
        environ = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": python_path}
        command = [sys.executable, "-c", COMPILES_A_KERNEL]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        return done.stdout, done.stderr

    first, second, uncached = run(tmp_path / "cache"), run(tmp_path / "cache"), run(nowhere / "below")

    assert first == ("12 True\n", "gpuenergyd: compiling the planner, once, about 20 s\n")
    assert second == ("12 False\n", "")
    assert uncached == (
        "12 True\n",
        "gpuenergyd: compiling the planner in memory, as no cache folder is writable, about 20 s\n",
    )


def test_any_change_of_a_kernel_file_changes_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that, numba misses a change in a kernel that another kernel calls."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "compiled.py"))
    (tmp_path / "exact").mkdir()
    kernel, other = tmp_path / "exact" / "kernels.py", tmp_path / "exact" / "tables.py"
    for path in (tmp_path / "compiled.py", other):
        path.write_text("one")

    def folder(content: str) -> Path | None:
        kernel.write_text(f"import numba\n\n\n@compiled\ndef kernel(): {content}")
        found: Path | None = compiled.cache_folder.__wrapped__()
        return found

    before, changed = folder("pass"), folder("return 1")
    other.write_text("two")

    assert before is not None
    assert changed is not None
    assert before != changed
    assert folder("return 1") == changed


def test_kernel_files_import_only_the_standard_library_and_kernel_files() -> None:
    root = Path(compiled.__file__).parents[2]
    kernels = {".".join(path.relative_to(root).with_suffix("").parts) for path in compiled.kernel_files()}

    assert (len(kernels), len(OF_PLUGIN)) == (8, 2)
    for path in (*compiled.kernel_files(), *OF_PLUGIN):
        if path.name == "compiled.py":
            continue
        imported = {
            node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module is not None
        }
        assert imported - sys.stdlib_module_names <= kernels, path


def called_kernels() -> set[tuple[str, Kernel[..., Any]]]:
    """Return the kernels that other modules call, by name."""
    # A kernel that only other kernels call is part of what they were compiled to.
    of_kernels = {".".join(("gpuenergyd_policies", *p.relative_to(ROOT).with_suffix("").parts)) for p in kernel_files()}
    of_kernels |= {f"gpuenergyd_plan.{path.parent.name}.{path.stem}" for path in OF_PLUGIN}
    return {
        (kernel.plain.__name__, kernel)
        for name, module in sys.modules.items()
        if name.startswith(("gpuenergyd_policies.planning.", "gpuenergyd_plan.")) and name not in of_kernels
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
def test_preparing_the_policy_compiles_every_kernel_so_that_no_plan_waits_for_it() -> None:
    script = (
        "from gpuenergyd.daemon.processes.plugins import load_policy\n"
        "load_policy('bubble-aware').prepare(print)\n"
        "from tests.policies.planning.test_compiled import called_kernels\n"
        "print(sorted(name for name, kernel in called_kernels() if not kernel.machine_code.signatures))"
    )

    loaded = subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, capture_output=True, text=True, check=True)

    assert loaded.stdout == "[]\n"


@pytest.mark.skipif(not IS_COMPILED, reason="numba is not installed or is disabled")
@pytest.mark.parametrize(
    ("folder", "announced", "trouble"),
    [
        ("empty", "compiling the planner, once", None),
        ("file/below", "compiling the planner in memory, as no cache folder is writable", NO_CACHE_FOLDER),
    ],
)
def test_a_compilation_is_announced_and_the_lack_of_a_cache_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, announced: str, trouble: str | None
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / folder))
    find = compiled.cache_folder.__wrapped__
    for module in (compiled, kernel_cache):
        monkeypatch.setattr(module, "cache_folder", find)
    clock = compiled.CompileClock()
    monkeypatch.setattr(kernel_cache, "COMPILE_CLOCK", clock)
    monkeypatch.setattr(kernel_cache, "_compile_once", clock.begin)
    heard: list[str] = []

    found = kernel_cache.prepare_kernels(heard.append)

    assert (heard, found) == ([announced], trouble)


@pytest.mark.skipif(not IS_COMPILED, reason="numba is not installed or is disabled")
def test_the_command_fails_if_nothing_keeps_what_it_compiles(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_cache, "cache_folder", lambda: None)

    assert main() == 1
    assert capsys.readouterr().err == f"{NO_CACHE_FOLDER}\n"


def test_the_command_says_where_the_compiled_planner_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    assert capsys.readouterr().out.startswith("planner compiled in " if IS_COMPILED else "numba is not")
