"""Energy windows: by the daemon, by pynvml without one, nested, and without either."""

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gpuenergyd
from gpuenergyd.client.connection import DaemonClient
from gpuenergyd.energy_windows import nvml, window
from gpuenergyd.errors import ProtocolError
from tests.support.daemon_process import running_daemon
from tests.support.waiting import LIMIT_S, wait_until


class NvmlError(Exception):
    """Stands for pynvml.NVMLError."""


@pytest.fixture
def counters_mj(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int | None]]:
    """Counters of two GPUs by a pynvml with the functions that a window calls; None raises its error."""
    counters: dict[str, int | None] = {"GPU-0": 1000, "GPU-1": 5000}

    def read(gpu_uuid: str) -> int:
        value = counters[gpu_uuid]
        if value is None:
            raise NvmlError
        return value

    names = list(counters)
    fake: Any = SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(names),
        nvmlDeviceGetHandleByIndex=names.__getitem__,
        nvmlDeviceGetUUID=str,
        nvmlDeviceGetTotalEnergyConsumption=read,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    nvml._library.cache_clear()
    yield counters
    nvml._library.cache_clear()


def test_a_daemon_reads_the_counters_for_anyone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "_READ_LIMIT_S", LIMIT_S)
    with running_daemon(tmp_path) as daemon, closing(DaemonClient(str(daemon.socket_path))) as client:
        gpu_uuids = [gpu["gpu_uuid"] for gpu in daemon.status()["gpus"]]

        def counter_j() -> float:
            return float(client.post("/v1/energy", {"gpu_uuids": gpu_uuids[:1]})["gpus"][0]["total_energy_j"])

        with (
            gpuenergyd.measure("outer", socket_path=str(daemon.socket_path)) as outer,
            gpuenergyd.measure("inner", gpu_uuids=gpu_uuids[:1], socket_path=str(daemon.socket_path)) as inner,
        ):
            is_known_inside = inner.energy_j is not None
            begun_j = counter_j()
            wait_until(lambda: counter_j() > begun_j)
        with pytest.raises(ProtocolError, match="no GPU 'GPU-x' on this host"):
            client.post("/v1/energy", {"gpu_uuids": ["GPU-x"]})

    assert not is_known_inside
    assert (outer.source, inner.source) == ("daemon", "daemon")
    assert set(outer.energy_by_gpu_j) == set(gpu_uuids)
    assert list(inner.energy_by_gpu_j) == gpu_uuids[:1]
    assert inner.energy_j is not None
    assert outer.energy_by_gpu_j[gpu_uuids[0]] >= inner.energy_j > 0


def test_without_a_daemon_pynvml_reads_and_windows_overlap(counters_mj: dict[str, int | None], tmp_path: Path) -> None:
    first = gpuenergyd.measure("first", socket_path=str(tmp_path / "none"))
    second = gpuenergyd.measure("second", gpu_uuids=["GPU-1"], socket_path=str(tmp_path / "none"))
    first.__enter__()
    counters_mj["GPU-1"] = 7000
    second.__enter__()
    counters_mj["GPU-0"] = 3000
    first.__exit__(None, None, None)
    counters_mj["GPU-1"] = 8500
    second.__exit__(None, None, None)

    assert (first.source, first.energy_j) == ("nvml", 4.0)
    assert first.energy_by_gpu_j == {"GPU-0": 2.0, "GPU-1": 2.0}
    assert (second.energy_j, second.energy_by_gpu_j) == (1.5, {"GPU-1": 1.5})


@pytest.mark.parametrize(("at_begin_mj", "at_end_mj"), [(5000, None), (5000, 10), (None, 9000)])
def test_a_counter_that_fails_or_was_reset_leaves_the_sum_unknown(
    counters_mj: dict[str, int | None], tmp_path: Path, at_begin_mj: int | None, at_end_mj: int | None
) -> None:
    counters_mj["GPU-1"] = at_begin_mj
    with gpuenergyd.measure(socket_path=str(tmp_path / "none")) as measured:
        counters_mj |= {"GPU-0": 2000, "GPU-1": at_end_mj}

    assert measured.energy_by_gpu_j == {"GPU-0": 1.0}
    assert measured.energy_j is None
    assert measured.power_w is None


def test_without_daemon_and_driver_only_the_time_is_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    nvml._library.cache_clear()
    with pytest.raises(ZeroDivisionError), gpuenergyd.measure("eval", socket_path=str(tmp_path / "none")) as measured:
        _ = 1 / 0

    assert measured.time_s is not None
    assert (measured.source, measured.energy_j) == (None, None)
    assert "window eval has no energy" in caplog.text
