"""The fetcher: periods, pauses after failures, and validation of its file and settings."""

import io
import json
import os
import threading
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.carbon.intensity import HOUR, CarbonSignal, IntensitySample, SampleStatus, SignalKind
from gpuenergyd.errors import CarbonDataError, CarbonSourceError
from gpuenergyd.key_files import read_key
from gpuenergyd_carbon.fetched_file import KEPT_HISTORY, Fetched, FetchState, FetchStatus, read_fetched, write_fetched
from gpuenergyd_carbon.fetching.fetcher import config_from_json, fetch_if_due, main, run, source_of
from gpuenergyd_carbon.sources.source import SourceReply
from gpuenergyd_carbon.sources.web import SourceError, SourceProblem
from tests.plugins.carbon.sources.documented import HOUR_AT, NOW_AT

SIGNAL = CarbonSignal("GB", "scripted")


def sample(hours: int, value: float = 200.0, status: SampleStatus = SampleStatus.MEASURED) -> IntensitySample:
    begin = HOUR_AT + hours * HOUR
    return IntensitySample(begin, begin + HOUR, value, status)


@dataclass(slots=True)
class ScriptedSource:
    """Answers with the next of its replies, or raises it."""

    replies: list[SourceReply | Exception]
    signal: CarbonSignal = SIGNAL
    period_s: float = 1800.0
    asked_at: list[datetime] = field(default_factory=list)

    def fetch(self, now_at: datetime) -> SourceReply:
        self.asked_at.append(now_at)
        reply = self.replies[min(len(self.asked_at), len(self.replies)) - 1]
        if isinstance(reply, Exception):
            raise reply
        return reply


def nothing_known() -> Fetched:
    return Fetched(SIGNAL, (), (), FetchStatus())


@pytest.mark.fault(25)
def test_a_provider_is_fetched_once_per_period() -> None:
    source = ScriptedSource([SourceReply((sample(-1),))])

    known = fetch_if_due(source, nothing_known(), NOW_AT)
    again = fetch_if_due(source, known, NOW_AT + timedelta(minutes=19))
    later = fetch_if_due(source, known, NOW_AT + timedelta(minutes=21))

    assert known.status.state is FetchState.OK
    assert again is known
    assert later is not known
    assert len(source.asked_at) == 2


@pytest.mark.fault(22)
def test_a_failure_keeps_the_known_values_and_names_the_problem() -> None:
    source = ScriptedSource([SourceReply((sample(-1),)), SourceError(SourceProblem.SERVER_ERROR, "neso: HTTP 500")])

    known = fetch_if_due(source, nothing_known(), NOW_AT)
    failed = fetch_if_due(source, known, NOW_AT + HOUR)

    assert failed.samples == known.samples
    assert failed.status.state is FetchState.FAILED
    assert (failed.status.problem, failed.status.message) == ("server-error", "neso: HTTP 500")
    assert failed.status.fetched_at == NOW_AT


@pytest.mark.fault(58)
def test_a_sandbox_key_takes_back_the_estimates_that_were_kept() -> None:
    measured, estimated = sample(-2), replace(sample(-1), status=SampleStatus.ESTIMATED)
    known = Fetched(SIGNAL, (measured, estimated), (), FetchStatus())

    refused = fetch_if_due(ScriptedSource([SourceError(SourceProblem.SANDBOX, "made up")]), known, NOW_AT)

    assert refused.samples == (measured,)
    assert refused.status.problem == "sandbox"


def test_pauses_double_up_to_two_hours_and_a_success_ends_them() -> None:
    failures: list[SourceReply | Exception] = [SourceError(SourceProblem.TIMEOUT, "x")] * 6
    source = ScriptedSource([*failures, SourceReply((sample(-1),))])
    known, at, pauses_s = nothing_known(), NOW_AT, []
    for _ in range(6):
        known = fetch_if_due(source, known, at)
        assert known.status.next_try_at is not None
        pauses_s.append((known.status.next_try_at - at).total_seconds())
        at = known.status.next_try_at

    assert pauses_s == [900, 1800, 3600, 7200, 7200, 7200]
    assert fetch_if_due(source, known, at).status.num_failures == 0


@pytest.mark.fault(25)
@pytest.mark.parametrize(
    ("error", "pause_s"),
    [
        (SourceError(SourceProblem.UNAUTHORIZED, "x"), 3600.0),
        (SourceError(SourceProblem.FORBIDDEN, "x"), 3600.0),
        (SourceError(SourceProblem.RATE_LIMITED, "x", retry_after_s=5000.0), 5000.0),
        (SourceError(SourceProblem.RATE_LIMITED, "x"), 900.0),
    ],
    ids=["401", "403", "429-with-retry-after", "429"],
)
def test_after_a_rejected_key_the_pause_is_longer(error: SourceError, pause_s: float) -> None:
    known = fetch_if_due(ScriptedSource([error]), nothing_known(), NOW_AT)

    assert known.status.next_try_at == NOW_AT + timedelta(seconds=pause_s)


def test_an_exception_in_a_third_party_source_is_a_failed_fetch() -> None:
    known = fetch_if_due(ScriptedSource([ZeroDivisionError("secret")]), nothing_known(), NOW_AT)

    assert known.status.state is FetchState.FAILED
    assert "secret" not in (known.status.message or "")


@pytest.mark.fault(26)
def test_a_clock_that_was_set_back_does_not_stop_fetching() -> None:
    source = ScriptedSource([SourceReply((sample(-1),))])
    known = fetch_if_due(source, nothing_known(), NOW_AT + timedelta(days=365))

    assert fetch_if_due(source, known, NOW_AT) is not known


def test_later_values_replace_estimates_and_old_ones_leave_the_file() -> None:
    first = SourceReply((sample(-(KEPT_HISTORY // HOUR) - 1), sample(-1, 100.0, SampleStatus.ESTIMATED)))
    second = SourceReply((sample(-1, 140.0),))
    source = ScriptedSource([first, second])

    known = fetch_if_due(source, fetch_if_due(source, nothing_known(), NOW_AT), NOW_AT + HOUR)

    assert known.samples == (sample(-1, 140.0),)


def test_a_stale_or_partly_unusable_reply_is_degraded() -> None:
    reply = SourceReply((sample(-24 * 3),), rejected=("null",), is_stale=True)

    status = fetch_if_due(ScriptedSource([reply]), nothing_known(), NOW_AT).status

    assert status.state is FetchState.DEGRADED
    assert status.message == "null; the newest value is older than a day"


def test_a_written_file_is_read_back_unchanged(tmp_path: Path) -> None:
    status = FetchStatus(FetchState.FAILED, "timeout", "no reply", 3, NOW_AT, NOW_AT + HOUR)
    fetched = Fetched(SIGNAL, (sample(-1),), (sample(1, 90.0, SampleStatus.FORECAST),), status)

    write_fetched(tmp_path / "f.json", fetched)

    assert read_fetched(tmp_path / "f.json") == fetched
    assert [path.name for path in tmp_path.iterdir()] == ["f.json"]


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps).map(str.encode)
)
def test_arbitrary_file_content_is_rejected(content: bytes) -> None:
    import tempfile  # noqa: PLC0415  hypothesis and tmp_path do not mix

    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        with pytest.raises(CarbonSourceError, match="fetched values"):
            read_fetched(Path(file.name))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d["fetched"]["samples"][0].update(carbon_intensity_g_per_kwh=-1.0),
        lambda d: d["fetched"]["samples"][0].update(carbon_intensity_g_per_kwh=1e6),
        lambda d: d["fetched"]["samples"][0].update(carbon_intensity_g_per_kwh=None),
        lambda d: d["fetched"]["samples"][0].update(valid_to_at="1970-01-01T00:00:00Z"),
        lambda d: d["fetched"]["samples"][0].update(valid_to_at="2100-01-01T00:00:00Z"),
        lambda d: d["fetched"]["samples"][0].update(valid_from_at="soon"),
        lambda d: d["fetched"]["samples"][0].update(status="guessed"),
        lambda d: d["fetched"]["signal"].update(zone="G" * 1000),
        lambda d: d["fetched"]["status"].update(fetched_at="2026-01-01T00:00:00"),
        lambda d: d.update(version=1),
        lambda d: d["fetched"].update(samples=d["fetched"]["samples"] * 30_000),
    ],
)
def test_an_invalid_file_is_rejected(tmp_path: Path, spoil: object) -> None:
    path = tmp_path / "f.json"
    write_fetched(path, Fetched(SIGNAL, (sample(-1),), (), FetchStatus()))
    document = json.loads(path.read_text())
    assert callable(spoil)
    spoil(document)
    path.write_text(json.dumps(document))

    with pytest.raises(CarbonSourceError, match="fetched values"):
        read_fetched(path)


def test_the_fetcher_process_writes_its_file_and_ends_on_sigterm(tmp_path: Path) -> None:
    stopped = threading.Event()
    source = ScriptedSource([SourceReply((sample(-1),))])
    config = config_from_json(json.dumps({"zone": "GB", "out_path": str(tmp_path / "f.json")}))

    def clock() -> datetime:
        stopped.set()
        return NOW_AT

    run(config, source, stopped, clock=clock)

    assert read_fetched(tmp_path / "f.json").samples == (sample(-1),)


def test_the_fetcher_process_rejects_unknown_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"zone": "GB", "out_path": "x", "secret": "hunter2"}'))

    assert main() == 2
    printed = capsys.readouterr()
    assert "unknown fetcher setting 'secret'" in printed.out
    assert "hunter2" not in printed.out + printed.err


@pytest.mark.fault(62)
def test_a_key_is_read_only_from_a_file_that_others_cannot_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    path.write_text("\n  abc123 \n")
    for mode in (0o644, 0o640, 0o602):
        path.chmod(mode)
        with pytest.raises(CarbonDataError, match=f"has mode {mode:04o} and is open to others; valid: 0600 or 0400"):
            read_key(path)
    path.chmod(0o600)
    key = read_key(path)
    if os.geteuid() == 0:
        os.chown(path, 4242, -1)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(CarbonDataError, match=f"belongs to uid {owner}; valid: uid {owner + 1} or root"):
        read_key(path)

    assert key == "abc123"


@pytest.mark.parametrize("content", [b"", b"\n\n", b"a\x00b", b"x" * 5000], ids=["empty", "blank", "binary", "long"])
def test_an_invalid_key_is_rejected_without_showing_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)

    with pytest.raises(CarbonDataError, match="has no key"):
        read_key(path)


def test_a_missing_or_special_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CarbonDataError, match="No such file"):
        read_key(tmp_path / "none")
    with pytest.raises(CarbonDataError, match="not a regular file"):
        read_key(tmp_path)


def test_the_configured_source_gets_its_options(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("user:password")
    key.chmod(0o600)
    settings = {"zone": "CAISO_NORTH", "source": "watttime", "key_path": str(key), "kind": "average", "out_path": "x"}

    source = source_of(config_from_json(json.dumps(settings)))

    assert source.signal.kind is SignalKind.AVERAGE
    assert "password" not in repr(source)
