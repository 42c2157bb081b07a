"""What an installed package with the AMD driver has: the metadata that names its entry point."""

from pathlib import Path

from tests.support.installed_distribution import install_distribution

ROOT = Path(__file__).parents[3]


def install_fake_amd(folder: Path) -> None:
    """Write the metadata into a folder; the package is installed where that folder is on sys.path."""
    entry_points = {"amd": "tests.support.fake_amd.driver:open_driver"}
    install_distribution(folder, "fake-amd", "gpuenergyd.drivers", entry_points)


def worker_program(folder: Path) -> tuple[str, str]:
    """Return arguments of Python that run the GPU worker with the packages in a folder."""
    program = (
        f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}];"
        " from gpuenergyd.gpu.worker.main import main; sys.exit(main())"
    )
    return "-c", program
