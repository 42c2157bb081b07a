"""An installed distribution with entry points and no files of its own, as plugins of this package are found."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest


def site_of(forget: Callable[[], None]) -> object:
    """Return a fixture: a folder for packages of plugins, and entry points are searched anew after `forget`."""

    @pytest.fixture(name="site")
    def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        monkeypatch.syspath_prepend(str(tmp_path))
        forget()
        yield tmp_path
        forget()

    return site


def install_distribution(
    folder: Path, name: str, group: str, entry_points: Mapping[str, str], *, version: str = "1.2"
) -> None:
    """Write a distribution's metadata into a folder; it is installed where that folder is on sys.path."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    lines = [f"[{group}]", *(f"{own} = {value}" for own, value in entry_points.items())]
    (info / "entry_points.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
