"""Tests of each adapter with the real framework, in the environments built by `make frameworks`."""

import os
import subprocess

import pytest

from docs.site.house_map import PYTHON_PATH
from tests.support.framework_environments import PACKAGES, ROOT, is_built, python_of
from tests.support.thorough import thorough

pytestmark = pytest.mark.torch

RUN_LIMIT_S = 500.0


@pytest.mark.parametrize("name", sorted(PACKAGES))
@pytest.mark.parametrize("selected", ["not thorough", *thorough("thorough")])
def test_adapter_works_with_the_installed_framework(name: str, selected: str) -> None:
    if not is_built(name):
        pytest.skip(f"no environment for {name} here; `make frameworks` builds one")
    tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/trainers").glob(f"test_{name}*.py"))
    done = subprocess.run(
        [python_of(name), "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-m", selected, *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PYTHON_PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    if done.returncode == 5 and selected == "thorough":
        pytest.skip(f"{name} has no thorough tests")
    if done.returncode == 0 and " passed" not in done.stdout:
        pytest.skip(done.stdout.strip().splitlines()[-1])

    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout.rpartition("\n=")[2]
