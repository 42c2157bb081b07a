"""A replaced file is whole, has the rights that it should have, and is unchanged after a failure."""

import os
from pathlib import Path

import pytest

from gpuenergyd.atomic_file import replace_file


def test_a_file_is_replaced_and_belongs_to_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b"old")

    replace_file(path, b"new")

    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]


def test_a_failure_leaves_neither_a_new_file_nor_an_unfinished_one(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.mkdir()  # cannot be replaced by a file

    with pytest.raises(OSError, match=r"state\.json"):
        replace_file(path, b"new")

    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize("is_durable", [False, True])
def test_a_public_file_may_be_read_by_all_whatever_the_umask(*, tmp_path: Path, is_durable: bool) -> None:
    path = tmp_path / "public.csv"
    umask = os.umask(0o077)
    try:
        replace_file(path, b"new", mode=0o644, is_durable=is_durable)
    finally:
        os.umask(umask)

    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o644
