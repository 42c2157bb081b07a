"""The GPU inventory: what GPUs of one model share."""

from dataclasses import replace

import pytest

from gpuenergyd.core.pipeline.switching import ENOUGH, LatencyBasis
from gpuenergyd.daemon.gpus.inventory import Gpus
from gpuenergyd.errors import GpuNotFoundError
from gpuenergyd.gpu.device import GpuIdentity
from gpuenergyd.gpu.link.messages import ClockChangeReport, GpuSample
from gpuenergyd.store.records import RollupRecord
from tests.core.host.test_measured_gpu import H200


def change(gpu_uuid: str, number: int) -> ClockChangeReport:
    asked_ns = 10**12 + number * 10**9
    return ClockChangeReport(
        *(gpu_uuid, 1200, asked_ns, asked_ns, asked_ns + 3_500_000, asked_ns + 4_500_000, 1200, None),
        previous_sm_clock_mhz=900,
    )


def test_gpus_of_one_model_learn_switch_latencies_together_and_others_apart() -> None:
    gpus = Gpus()
    models = ("A100", "A100", "H100")
    gpus.update(GpuIdentity(f"GPU-{k}", k, name, (1410, 1200, 900), is_simulated=True) for k, name in enumerate(models))

    news = [gpus[f"GPU-{k % 2}"].record_clock_change(change(f"GPU-{k % 2}", k)) for k in range(ENOUGH)]

    assert news == [False] * (ENOUGH - 1) + [True]
    bases = [gpu.view().switch_latency.basis for gpu in gpus]
    assert bases == [LatencyBasis.MEASURED, LatencyBasis.MEASURED, LatencyBasis.ASSUMED]
    assert [gpu.identity.gpu_uuid for gpu in gpus.of_same_model(gpus["GPU-1"])] == ["GPU-0", "GPU-1"]


def test_a_rank_on_an_instance_is_refused_with_a_sentence_about_mig() -> None:
    with pytest.raises(GpuNotFoundError, match=r"is a MIG instance: .* disable MIG"):
        Gpus()["MIG-7d3f1c2a-0c55-5f0f-9e0b-1f2e3d4c5b6a"]


def test_power_while_waiting_is_the_measured_one_where_none_is_published() -> None:
    gpus, measured = Gpus(), replace(H200, model_name="B", driver_version=None)
    identities = [GpuIdentity(f"GPU-{k}", k, name, (1410,), is_simulated=True) for k, name in enumerate("AB")]
    gpus.update([replace(identities[0], blocking_power_w=83.6), identities[1]])

    kept = [gpus.keep_measured(own) for own in (measured, replace(measured, model_name="A"), H200)]

    assert kept == [True, True, False]
    assert [gpus.view(gpu).blocking_power_w for gpu in gpus] == [83.6, 126.0]
    gpus.refresh(replace(identities[1], driver_version="590.2"))
    assert gpus.view(gpus["GPU-1"]).blocking_power_w is None


def _reading(gpu_uuid: str, second: int) -> GpuSample:
    at_ns = 10**12 + second * 10**9
    return GpuSample(gpu_uuid, at_ns, 100.0, 100.0 * second, at_ns, 1410, 40.0, is_power_capped=None)


def test_each_gpu_records_its_share_of_the_power_assumed_for_the_host() -> None:
    gpus = Gpus(host_power_w=300.0)
    gpus.update(GpuIdentity(f"GPU-{k}", k, "A100", (1410,), is_simulated=True) for k in range(2))

    records = [
        record
        for gpu in gpus
        for k in range(20)
        for record in gpu.record_sample(_reading(f"GPU-{gpu.identity.index}", k))
    ]

    hours = [record for record in records if isinstance(record, RollupRecord) and record.bucket_s == 3600]
    seconds = sum(record.measured_s + record.estimated_s + record.missing_s for record in hours)
    assert seconds > 20.0
    assert sum(record.assumed_host_j or 0.0 for record in hours) == pytest.approx(150.0 * seconds)
