import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuenergyd.gpu.simulated import SimulatedHost
from tests.support.virtual_time import VirtualTime


@pytest.fixture
def virtual_time() -> VirtualTime:
    """A clock that only the test moves."""
    return VirtualTime()


@pytest.fixture
def host(tmp_path: Path, virtual_time: VirtualTime) -> Iterator[SimulatedHost]:
    """Two simulated A100s in virtual time, held by this process."""
    made = SimulatedHost.create(
        tmp_path / "world", ["a100-sxm", "a100-sxm"], seed=7, mono_ns=virtual_time.mono_ns, sleep=virtual_time.sleep
    )
    for identity in made.identities():
        made.attach_process(identity.gpu_uuid, os.getpid())
    yield made
    made.close()
