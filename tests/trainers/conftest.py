from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.fake_daemon import FakeDaemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    """A daemon that records what it is sent."""
    with FakeDaemon(tmp_path) as fake:
        yield fake
