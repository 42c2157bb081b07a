"""Replies that version 0.3 read wrongly give the right values and sentences."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpuenergyd_carbon.sources.source import SourceOptions, SourceReply, make_source
from gpuenergyd_carbon.sources.web import SourceError, Web
from tests.support.measured_tables import SHARED
from tests.support.waiting import wait_until

REPLIES = SHARED / "cases/carbon/replies.py"

pytestmark = pytest.mark.skipif(not REPLIES.exists(), reason="the shared cases are not on this machine")


@contextmanager
def replaying(case: str, folder: Path) -> Iterator[str]:
    """Replay the replies of a case; return the address."""
    port = folder / "port"
    with subprocess.Popen([sys.executable, str(REPLIES), case, str(port)]) as server:
        try:
            wait_until(lambda: port.exists() and port.read_text().isdecimal())
            yield f"http://127.0.0.1:{port.read_text()}"
        finally:
            server.terminate()


def fetch(case: str, source: str, zone: str, folder: Path) -> SourceReply:
    with replaying(case, folder) as url:
        options = SourceOptions(zone, Web(), key="user:password", base_url=url)
        return make_source(source, options).fetch(datetime.now(tz=UTC))


@pytest.mark.parametrize(
    ("case", "source", "zone", "g_per_kwh"),
    [
        ("eia-bat", "eia", "CISO", 231),
        ("eia-partial", "eia", "PSEI", 136),
        ("ent-b25", "entsoe", "FR", 143),
        ("ent-nob25", "entsoe", "FR", 143),
        ("ent-mixed", "entsoe", "FR", 42),
        ("ent-mixed-ref", "entsoe", "FR", 42),
    ],
)
def test_a_mix_has_its_right_intensity(case: str, source: str, zone: str, g_per_kwh: int, tmp_path: Path) -> None:
    newest = fetch(case, source, zone, tmp_path).samples[-1]

    assert newest.carbon_intensity_g_per_kwh == pytest.approx(g_per_kwh, abs=1)


@pytest.mark.parametrize(
    ("case", "source", "zone", "sentence"),
    [
        ("em-sandbox", "electricity-maps", "FR", "made up"),
        ("em-zone401", "electricity-maps", "FR", "Request unauthorized for zoneKey=FR"),
        ("ent-ack400", "entsoe", "FR", "No matching data found for Data item"),
        ("wt-region400", "watttime", "ATLANTIS", "Invalid region: ATLANTIS"),
    ],
)
def test_a_refusal_shows_its_reason(case: str, source: str, zone: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=sentence):
        fetch(case, source, zone, tmp_path)


@pytest.mark.parametrize(
    ("case", "source", "zone"), [("neso-fw500", "neso", "GB"), ("em-null", "electricity-maps", "FR")]
)
def test_what_is_valid_is_kept_and_the_rest_named(case: str, source: str, zone: str, tmp_path: Path) -> None:
    reply = fetch(case, source, zone, tmp_path)

    assert len(reply.samples) >= 21
    assert reply.rejected
