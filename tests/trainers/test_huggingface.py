"""The Hugging Face Trainer with the callback, and a loop under Accelerate; requires both packages."""

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

import gpuenergyd  # noqa: E402  after the skips
from gpuenergyd_trainers.huggingface import gpuenergy_callback  # noqa: E402
from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon  # noqa: E402
from tests.trainers.example_runs import check_example  # noqa: E402
from tests.trainers.tracker_files import SCALARS, WITHOUT_NETWORK  # noqa: E402
from tests.trainers.unchanged_programs import check_one_process_joined  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


def train(folder: Path, callbacks: list[Any], trackers: tuple[str, ...] = ()) -> list[str]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(config)
    rows = [{"input_ids": torch.arange(8) + k, "labels": torch.arange(8) + k} for k in range(8)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"), num_train_epochs=2, per_device_train_batch_size=1,
        gradient_accumulation_steps=2, use_cpu=True, report_to=list(trackers),
        include_num_input_tokens_seen=bool(trackers), logging_steps=1, eval_strategy="steps", eval_steps=2,
        save_strategy="no", disable_tqdm=True, seed=1,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:2], callbacks=callbacks
    )
    trainer.train()
    return [float(entry["loss"]).hex() for entry in trainer.state.log_history if "loss" in entry]


def pacing_callback(daemon: FakeDaemon, reports: list[dict[str, Any]]) -> Any:
    """Delay each step until the daemon has the previous report, so that none is dropped."""

    class Pacing(transformers.TrainerCallback):  # type: ignore[misc, name-defined]  # its types are known only where it is installed
        num_begun = 0

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            """Wait for the report of the previous step, which is sent when this one's iteration begins."""
            if self.num_begun > 0:
                reports.append(daemon.reports.get(timeout=WAIT_LIMIT_S))
            self.num_begun += 1

    return Pacing()


def test_optimizer_steps_are_iterations_and_evaluations_are_not(tmp_path: Path) -> None:
    plain = train(tmp_path, [])
    reports: list[dict[str, Any]] = []
    with FakeDaemon(tmp_path) as daemon:
        ours = gpuenergy_callback("gpt2", gpu_uuid="GPU-1", socket_path=daemon.socket_path, phases=False)
        joined = train(tmp_path, [ours, pacing_callback(daemon, reports)])
        daemon.releases.get(timeout=WAIT_LIMIT_S)
        reports.append(daemon.reports.get(timeout=WAIT_LIMIT_S))

    assert joined == plain
    assert [report["iteration_index"] for report in reports] == list(range(8))
    assert [report["next_begin_mono_ns"] == 0 for report in reports] == [False, True] * 4


@pytest.mark.parametrize("tracker", SCALARS)
def test_trackers_show_the_measured_figures_of_the_job(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in WITHOUT_NETWORK.items():
        monkeypatch.setenv(name, value.format(folder=tmp_path))
    # TRL has imported Trackio, which reads its folder when it is imported.
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    pytest.importorskip(tracker)
    for name, module in list(sys.modules.items()):
        if name.startswith("trackio") and hasattr(module, "TRACKIO_DIR"):  # trl imports it before the folder is set
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    reports: list[dict[str, Any]] = []
    with FakeDaemon(tmp_path) as daemon:
        daemon.figures = {"figures": {"phase": "tuned", "power_w": 290.0, "energy_j": 7.2e6}}  # type: ignore[dict-item]  # the other figures are numbers
        ours = gpuenergy_callback(
            "gpt2", gpu_uuid="GPU-1", socket_path=daemon.socket_path, phases=False, price_per_kwh=0.3
        )
        train(tmp_path, [ours, pacing_callback(daemon, reports)], (tracker,))

    assert [report["num_tokens"] for report in reports] == [16] * 7  # two rows of eight tokens
    prefix = "" if tracker == "mlflow" else "train/"
    scalars = SCALARS[tracker](tmp_path)
    assert scalars[f"{prefix}gpuenergyd/power_w"] == 290.0
    assert scalars[f"{prefix}gpuenergyd/cost"] == pytest.approx(0.6)
    assert scalars[f"{prefix}gpuenergyd/state"] == 4
    assert f"{prefix}gpuenergyd/saving_ratio" not in scalars
    assert not any("gpuenergyd" in name for name in scalars if name.startswith("eval"))


def train_under_accelerate(daemon: FakeDaemon | None, reports: list[dict[str, Any]]) -> list[str]:
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(4, 1)
    rows = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(8, 4) / 32)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.DataLoader(rows, batch_size=1)
    )
    losses = []
    socket_path = daemon.socket_path if daemon else "/none"
    with gpuenergyd.job(
        "accelerated", gpu_uuid="GPU-1" if daemon else None, socket_path=socket_path, phases=False
    ) as job:
        for index, (batch,) in enumerate(loader):
            with job.iteration(), accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()).hex())
            if daemon is not None and index > 0:
                reports.append(daemon.reports.get(timeout=WAIT_LIMIT_S))
    return losses


def test_a_loop_under_accelerate_is_a_plain_loop(tmp_path: Path) -> None:
    reports: list[dict[str, Any]] = []
    plain = train_under_accelerate(None, reports)
    with FakeDaemon(tmp_path) as daemon:
        joined = train_under_accelerate(daemon, reports)
        daemon.releases.get(timeout=WAIT_LIMIT_S)
        reports.append(daemon.reports.get(timeout=WAIT_LIMIT_S))

    assert joined == plain
    assert [report["iteration_index"] for report in reports] == list(range(8))


UNCHANGED = """
import tempfile
import accelerate
import torch
import transformers

# A loop of its own under Accelerate has no method that is known to be a step: it goes on without us.
accelerator = accelerate.Accelerator(cpu=True)
layer = torch.nn.Linear(4, 1)
layer, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
for step in range(3):
    accelerator.backward(layer(torch.full((2, 4), step / 5)).square().mean())
    optimizer.step()
    optimizer.zero_grad()

torch.manual_seed(0)
model = transformers.GPT2LMHeadModel(
    transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1))
rows = [{"input_ids": torch.arange(8) + k, "labels": torch.arange(8) + k} for k in range(8)]
arguments = transformers.TrainingArguments(output_dir=tempfile.mkdtemp(), max_steps=24, use_cpu=True, report_to=[],
    per_device_train_batch_size=1, logging_steps=1, save_strategy="no", disable_tqdm=True, seed=1)
trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
trainer.remove_callback(transformers.PrinterCallback)
trainer.train()
print(*(float(entry["loss"]).hex() for entry in trainer.state.log_history if "loss" in entry))
"""


def test_an_unmodified_program_joins_under_gpuenergyd_run_with_equal_losses(tmp_path: Path) -> None:
    check_one_process_joined(tmp_path, UNCHANGED, num_losses=24)


@pytest.mark.parametrize("name", ["huggingface_gpt2", "accelerate_images"])
def test_the_example_learns_and_joins_unmodified(tmp_path: Path, name: str) -> None:
    check_example(tmp_path, name)
