"""What an installed package with the AMD driver has: the metadata that names its entry point."""

from pathlib import Path

ROOT = Path(__file__).parents[3]


def install_fake_amd(folder: Path) -> None:
    """Write the metadata into a folder; the package is installed where that folder is on sys.path."""
    info = folder / "fake_amd-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-amd\nVersion: 1.0\n")
    entry_points = "[gpuenergyd.drivers]\namd = tests.support.fake_amd.driver:open_driver\n"
    (info / "entry_points.txt").write_text(entry_points)


def worker_program(folder: Path) -> tuple[str, str]:
    """Return arguments of Python that run the GPU worker with the packages in a folder."""
    program = (
        f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}];"
        " from gpuenergyd.gpu.worker.main import main; sys.exit(main())"
    )
    return "-c", program
