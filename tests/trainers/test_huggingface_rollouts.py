"""TRL's trainers, whose steps begin with the generation of the samples that they train on; requires TRL."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
trl = pytest.importorskip("trl")
constants = pytest.importorskip("huggingface_hub.constants")

from examples import trl_grpo  # noqa: E402  after the skips
from gpuenergyd_trainers.huggingface import gpuenergy_callback  # noqa: E402
from tests.client.fake_daemon import FakeDaemon  # noqa: E402
from tests.trainers.test_huggingface import pacing_callback  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

NUM_STEPS = 8


def rewards(trainer: Any) -> list[float]:
    """Train and return the mean reward of each rollout."""
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_rollouts_are_pauses_and_training_steps_are_iterations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    trainer_class = getattr(trl, f"{method}Trainer")
    monkeypatch.setattr(trl_grpo, "GRPOTrainer", trainer_class)  # the same example with the other method
    without_reference = partial(getattr(trl, f"{method}Config"), beta=0.0)  # a reference model would be downloaded
    monkeypatch.setattr(trl_grpo, "GRPOConfig", without_reference)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)  # it would be sent by a thread
    plain = rewards(trl_grpo.make_trainer(str(tmp_path), num_steps=NUM_STEPS, callbacks=[]))
    rollouts: list[bool] = []
    reports: list[dict[str, Any]] = []
    original = trainer_class._generate_and_score_completions
    with FakeDaemon(tmp_path) as daemon:
        ours = gpuenergy_callback(method, gpu_uuid="GPU-1", socket_path=daemon.socket_path, phases=False)

        def generate(trainer: Any, inputs: Any) -> Any:
            rollouts.append(ours._marks._iteration is not None)
            return original(trainer, inputs)

        monkeypatch.setattr(trainer_class, "_generate_and_score_completions", generate)
        callbacks = [ours, pacing_callback(daemon, reports)]
        joined = rewards(trl_grpo.make_trainer(str(tmp_path), num_steps=NUM_STEPS, callbacks=callbacks))

    assert joined == plain
    assert rollouts == [False] * (NUM_STEPS // trl_grpo.STEPS_PER_ROLLOUT)
    assert [report["iteration_index"] for report in reports] == list(range(NUM_STEPS - 1))
    assert [report["next_begin_mono_ns"] == 0 for report in reports] == [False, True] * (NUM_STEPS // 2 - 1) + [False]
