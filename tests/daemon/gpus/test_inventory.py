"""The GPU inventory: what GPUs of one model share."""

import pytest

from gpuenergyd.core.pipeline.switching import ENOUGH, LatencyBasis
from gpuenergyd.daemon.gpus.inventory import Gpus
from gpuenergyd.errors import GpuNotFoundError
from gpuenergyd.gpu.device import GpuIdentity
from gpuenergyd.gpu.link.messages import ClockChangeReport


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
