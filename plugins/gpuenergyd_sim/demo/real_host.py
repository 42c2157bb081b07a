"""The demo's host in real time: daemon and training as separate processes."""

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuenergyd_sim.private_daemon.daemon import start_daemon
from gpuenergyd_sim.private_daemon.processes import Child, Children

if TYPE_CHECKING:
    from gpuenergyd.daemon.settings import Settings


class RealHost:
    """Runs the demo's processes on this host; `children` ends them."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self._training: Child | None = None

    def start_daemon(self, settings: "Settings", config: Path) -> None:
        start_daemon(
            self._children,
            config.parent,
            "--mode", "control",
            "--driver", settings.driver,
            "--world", str(settings.world_path),
            "--policy", settings.policy,
            "--max-slowdown", str(settings.max_slowdown_ratio),
            "--baseline-iterations", str(settings.baseline_iterations),
        )  # fmt: skip

    def start_training(self, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        """Start the program that starts all ranks."""
        self._training = self._children.start("training", ["gpuenergyd_sim.training.gpt", *arguments], **variables)

    def training_step(self) -> str | None:
        return self._training.last_line("gpt: ") if self._training is not None else None

    def has_training_ended(self) -> bool:
        return self._training is not None and self._training.has_ended()

    def check(self) -> None:
        self._children.check()

    def kill_worker(self, status: Mapping[str, Any]) -> None:
        if (pid := status["worker"]["pid"]) is not None:
            os.kill(pid, signal.SIGKILL)

    def stop_training(self) -> None:
        if self._training is not None:
            self._children.stop(self._training)
