"""What keeps a pipeline across hosts at full speed is one line in the log of the training process, which goes on."""

import logging
import threading
from pathlib import Path
from socketserver import UnixStreamServer
from types import SimpleNamespace
from typing import Any

import pytest

from gpuenergyd.client.rank import RankClient
from gpuenergyd.errors import UsageError
from gpuenergyd_across_hosts.ranks.job_store import STORE_VARIABLE
from gpuenergyd_across_hosts.ranks.local_daemon import LocalDaemon
from gpuenergyd_across_hosts.ranks.store_thread import StoreThread
from gpuenergyd_trainers import deepspeed
from gpuenergyd_trainers.joining.membership import find_membership
from gpuenergyd_trainers.joining.place import Coordinate, Place
from tests.support.http_handler import QuietHandler
from tests.support.waiting import LIMIT_S, wait_until

WARNINGS = "gpuenergyd.trainers"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == WARNINGS]


def test_a_refused_message_is_logged_once_for_each_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reasons = ["too many ranks", "too many ranks", "another order"]

    class Refusing(QuietHandler):
        """Refuses everything."""

        def address_string(self) -> str:
            """Return no address: the socket has none."""
            return ""

        def do_POST(self) -> None:  # noqa: N802  the name that http.server calls it by
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_json(b'{"error": "%s"}' % reasons.pop(0).encode(), 400)

    path = str(tmp_path / "s")
    with UnixStreamServer(path, Refusing) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        daemon = LocalDaemon(path)
        with caplog.at_level(logging.WARNING, logger=WARNINGS):
            replies = [daemon.post("/v1/pipelines", {}) for _ in range(3)]
        daemon.close()
        server.shutdown()
        thread.join()

    assert replies == [None] * 3
    refused = "gpuenergyd: the daemon refused POST /v1/pipelines, the pipeline runs at full speed: "
    assert lines(caplog) == [refused + "too many ranks", refused + "another order"]


def test_a_store_that_cannot_be_used_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    tried: list[int] = []

    def connect() -> Any:
        tried.append(1)
        raise ConnectionError("no route")

    ended = threading.Event()
    with caplog.at_level(logging.WARNING, logger=WARNINGS):
        thread = StoreThread(
            lambda _store: None,
            connect,
            name="rank 0 of its pipeline",
            consequence="training continues at full speed",
            at_end=ended.set,
        )
        wait_until(lambda: bool(lines(caplog)))
        thread.stop()

    assert tried
    assert ended.wait(LIMIT_S)
    (line,) = lines(caplog)
    assert line == (
        "gpuenergyd: rank 0 of its pipeline cannot use the job's store (ConnectionError('no route'));"
        " training continues at full speed"
    )


def test_a_pipeline_across_hosts_without_a_store_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (STORE_VARIABLE, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    membership = find_membership(Place(pipeline=Coordinate(0, 2), is_across_hosts=True), "run")

    (line,) = lines(caplog)
    assert line == (
        "gpuenergyd: the pipeline spans hosts, but its ranks cannot find the job's store: set MASTER_ADDR and"
        f" MASTER_PORT, or {STORE_VARIABLE}; training continues at full speed"
    )
    client: Any = RankClient
    assert membership.start_exchange(client, None) is None
    assert membership.plans is None


def test_a_schedule_of_deepspeed_that_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    class InferenceSchedule:
        """Another schedule of DeepSpeed."""

    engine = SimpleNamespace(_train_schedule=InferenceSchedule)

    handle = deepspeed.attach(engine, job="gpt")

    assert not handle.is_attached
    (line,) = lines(caplog)
    assert line == (
        "gpuenergyd: job gpt: SimpleNamespace cannot be joined, training continues at full speed:"
        " UsageError('unsupported schedule InferenceSchedule; supported: TrainSchedule (1F1B)')"
    )


@pytest.mark.torch
def test_a_tensor_parallel_rank_beyond_its_stage() -> None:
    pytest.importorskip("torch")
    from gpuenergyd_trainers.joining.place_sources import pipeline_group_place  # noqa: PLC0415  imports torch

    with pytest.raises(UsageError, match=r"tp_rank 2 must be in \[0, num_tp_ranks 2\)"):
        pipeline_group_place(None, tp_rank=2, num_tp_ranks=2)
