"""Lightning's Trainer with the callback; requires Lightning."""

import importlib
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
lightning = pytest.importorskip("lightning.pytorch")

from gpuenergyd_trainers.lightning import gpuenergy_callback  # noqa: E402  after the skips
from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon  # noqa: E402
from tests.trainers.example_runs import check_example  # noqa: E402
from tests.trainers.tracker_files import SCALARS, WITHOUT_NETWORK  # noqa: E402
from tests.trainers.unchanged_programs import check_one_process_joined  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

NUM_BATCHES = 4


def make_module() -> Any:
    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]  # its types are known only where it is installed
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(4, 1)
            self.seen: list[str] = []

        def training_step(self, batch: Any, _index: int) -> Any:
            """Return the loss and record its exact value."""
            loss = self.layer(batch[0]).square().mean()
            self.seen.append(float(loss.detach()).hex())
            return loss

        def validation_step(self, batch: Any, _index: int) -> Any:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            """Return plain SGD."""
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def fit(folder: Path, callbacks: list[Any], *, logger: Any = False) -> list[str]:
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(32.0).reshape(8, 4)), batch_size=2)
    module = make_module()
    trainer = lightning.Trainer(
        default_root_dir=folder, accelerator="cpu", max_epochs=2, callbacks=callbacks, logger=logger,
        log_every_n_steps=2, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data, data)
    seen: list[str] = module.seen
    return seen


class Pace:
    """Delays each batch until the daemon has the previous report, so that none is dropped."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self.daemon = daemon
        self.reports: list[dict[str, Any]] = []
        self.num_begun = 0

    def callback(self) -> Any:
        """Return the callback that delays batches."""
        pace = self

        class Pacing(lightning.Callback):  # type: ignore[misc, name-defined]  # as above
            def on_train_batch_start(self, *_: Any) -> None:
                """Wait for the report of the previous batch."""
                if pace.num_begun > 0:
                    pace.reports.append(pace.daemon.reports.get(timeout=WAIT_LIMIT_S))
                pace.num_begun += 1

        return Pacing()


def test_batches_are_iterations_and_validation_ends_the_one_before(tmp_path: Path) -> None:
    plain = fit(tmp_path, [])
    with FakeDaemon(tmp_path) as daemon:
        pace = Pace(daemon)
        ours = gpuenergy_callback("image-model", gpu_uuid="GPU-1", socket_path=daemon.socket_path, phases=False)
        joined = fit(tmp_path, [ours, pace.callback()])
        daemon.releases.get(timeout=WAIT_LIMIT_S)
        pace.reports.append(daemon.reports.get(timeout=WAIT_LIMIT_S))

    assert joined == plain
    assert [report["iteration_index"] for report in pace.reports] == list(range(2 * NUM_BATCHES))
    was_last = [report["next_begin_mono_ns"] == 0 for report in pace.reports]
    assert was_last == [False, False, False, True] * 2


@pytest.mark.parametrize(
    ("tracker", "logger_class", "options"),
    [
        ("tensorboard", "TensorBoardLogger", {"save_dir": "{folder}/board"}),
        ("mlflow", "MLFlowLogger", {"tracking_uri": "sqlite:///{folder}/mlflow.db"}),
        ("wandb", "WandbLogger", {"save_dir": "{folder}"}),
    ],
)
def test_loggers_show_the_measured_figures_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str, logger_class: str, options: dict[str, str]
) -> None:
    for name, value in WITHOUT_NETWORK.items():
        monkeypatch.setenv(name, value.format(folder=tmp_path))
    options = {name: value.format(folder=tmp_path) for name, value in options.items()}
    logger = getattr(importlib.import_module("lightning.pytorch.loggers"), logger_class)(**options)
    with FakeDaemon(tmp_path) as daemon:
        daemon.figures = {"figures": {"phase": "baseline", "power_w": 290.0}}  # type: ignore[dict-item]  # the other figures are numbers
        ours = gpuenergy_callback("image-model", gpu_uuid="GPU-1", socket_path=daemon.socket_path, phases=False)
        fit(tmp_path, [ours, Pace(daemon).callback()], logger=logger)

    ours_only = {name: value for name, value in SCALARS[tracker](tmp_path).items() if "gpuenergyd" in name}
    assert ours_only == {"gpuenergyd/power_w": 290.0, "gpuenergyd/state": 2}


UNCHANGED = """
import lightning.pytorch as lightning
import torch

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, _index):
        loss = self.layer(batch[0]).square().mean()
        print(float(loss.detach()).hex())
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(96.0).reshape(24, 4) / 96), batch_size=2)
trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, barebones=False)
trainer.fit(Module(), data)
"""


def test_an_unmodified_program_joins_under_gpuenergyd_run_with_equal_losses(tmp_path: Path) -> None:
    check_one_process_joined(tmp_path, UNCHANGED, num_losses=24)


def test_the_example_learns_and_joins_unmodified(tmp_path: Path) -> None:
    check_example(tmp_path, "lightning_images")
