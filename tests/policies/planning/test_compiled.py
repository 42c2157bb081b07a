"""Kernels compiled or plain: what they are given, and where compiled ones are kept."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpuenergyd_policies.planning import compiled


def _doubled(value: int) -> int:
    return 2 * value


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, bool], str]]:
    """Have kernels compiled by what only notes how it was asked to, and which cache folder was set by then."""
    notes: list[tuple[dict[str, bool], str]] = []
    numba = SimpleNamespace(config=SimpleNamespace(CACHE_DIR="as before"))

    def njit(**options: bool) -> object:
        notes.append((options, numba.config.CACHE_DIR))
        return lambda kernel: kernel

    numba.njit = njit
    monkeypatch.setattr(compiled, "numba", numba)
    monkeypatch.setattr(compiled, "IS_COMPILED", True)
    return notes


def test_a_kernel_is_kept_in_the_cache_folder_and_lets_other_threads_run(
    told: list[tuple[dict[str, bool], str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_cache_folder", lambda: tmp_path)

    assert compiled.compiled(_doubled)(21) == 42
    assert told == [({"cache": True, "nogil": True}, str(tmp_path))]
    assert compiled.numba.config.CACHE_DIR == "as before"


def test_a_kernel_is_compiled_in_memory_where_nothing_can_be_kept(
    told: list[tuple[dict[str, bool], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_cache_folder", lambda: None)

    assert compiled.compiled(_doubled)(21) == 42
    assert told == [({"nogil": True}, "as before")]


def test_a_kernel_stays_as_it_is_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "IS_COMPILED", False)

    assert compiled.compiled(_doubled) is _doubled
    assert (compiled.ints([1.0, 2.0]), compiled.floats([1, 2])) == ([1, 2], [1.0, 2.0])
    assert [type(v) for v in (compiled.ints([1.0])[0], compiled.floats([1])[0])] == [int, float]


def test_compiled_kernels_are_given_arrays_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "IS_COMPILED", True)
    every_other = np.arange(6)[::2]

    cases: list[tuple[Any, type]] = [
        (compiled.ints(every_other), np.int64),
        (compiled.floats(every_other), np.float64),
    ]
    for array, dtype in cases:
        assert isinstance(array, np.ndarray)
        assert (array.dtype, array.tolist()) == (dtype, [0, 2, 4])
        assert array.flags.c_contiguous


def test_kernels_are_kept_beside_the_code_or_with_the_user_or_where_numba_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "code" / "compiled.py"))
    (tmp_path / "code").mkdir()
    for source in compiled.KERNEL_SOURCES:
        (tmp_path / "code" / source).parent.mkdir(exist_ok=True)
        (tmp_path / "code" / source).write_text("one")
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    find = compiled._cache_folder.__wrapped__

    beside = find()
    (tmp_path / "code" / "__pycache__").rename(tmp_path / "gone")
    (tmp_path / "code" / "__pycache__").touch()  # a file: nothing can be written below
    of_user = find()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "told"))
    where_told = find()

    assert beside is not None
    assert where_told is not None
    assert [beside, of_user, where_told] == [
        tmp_path / parent / beside.name for parent in ("code/__pycache__", "user/gpuenergyd", "told")
    ]
    assert beside.name.startswith("kernels-")
    assert len(beside.name) == len("kernels-") + 16
    assert where_told.is_dir()
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert compiled._user_cache_folder() == Path.home() / ".cache" / "gpuenergyd"


def test_kernels_are_compiled_if_numba_is_there_and_not_turned_off() -> None:
    assert compiled.numba is not None
    assert compiled.IS_COMPILED is not bool(compiled.numba.config.DISABLE_JIT)


def test_kernels_compile_where_no_cache_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(compiled, "_cache_folder", compiled._cache_folder.__wrapped__)

    def doubled(value: int) -> int:
        return 2 * value

    assert compiled._cache_folder() is None
    assert compiled.compiled(doubled)(21) == 42


def test_kernels_of_other_source_are_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache folder is named after the content of every kernel's file: numba alone would miss a changed callee."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "compiled.py"))
    for source in compiled.KERNEL_SOURCES:
        (tmp_path / source).parent.mkdir(exist_ok=True)
        (tmp_path / source).write_text("one")
    before = compiled._cache_folder.__wrapped__()
    (tmp_path / "exact" / "sweep.py").write_text("two")

    after = compiled._cache_folder.__wrapped__()

    assert before is not None
    assert after is not None
    assert before != after


def test_every_file_with_a_kernel_counts_for_the_cache() -> None:
    folder = Path(compiled.__file__).parent
    with_kernels = {path.name for path in folder.glob("*.py") if "\n@compiled\n" in path.read_text()}

    assert with_kernels <= set(compiled.KERNEL_SOURCES)
