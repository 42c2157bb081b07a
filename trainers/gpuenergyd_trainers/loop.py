"""Adapter for plain training loops: `for batch in iterations(loader, job="resnet"):`.

Loops that mark no iterations are joined by `gpuenergyd run`, which finds the iterations from optimizer steps.
"""

import atexit
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import gpuenergyd
from gpuenergyd.client.environment import find_gpu_uuid, missing_gpu_reason
from gpuenergyd.client.figures import numbers_of
from gpuenergyd.client.loop import LoopJob, unmarked_job
from gpuenergyd.client.phases.step_cycle import STEPS_WITHOUT_CYCLE, StepCycle, StepTurn
from gpuenergyd.client.rank import has_clients
from gpuenergyd.client.run_mark import delete_mark, record_obstacle, report_without_steps
from gpuenergyd.count_text import count_text
from gpuenergyd.log_lines import safe_logger
from gpuenergyd.wire.messages import JobFigures

logger = safe_logger("gpuenergyd.trainers")

T = TypeVar("T")
_STEPS_BEFORE_JOINING = 2
"""By this step, a program that marks its iterations has joined."""
_LAST_STEP_TO_JOIN = 16
"""A program that has not used a GPU by this step will not use one."""


def iterations(
    batches: Iterable[T],
    *,
    job: str | None = None,
    gpu_uuid: str | None = None,
    socket_path: str | None = None,
    policy: str | None = None,
    max_slowdown_ratio: float | None = None,
    phases: bool = True,
) -> Iterator[T]:
    """Yield the batches; each run of the loop's body is an iteration, without the time to load the next batch.

    For loops on one GPU, with DistributedDataParallel or with FSDP; one GPU per process. Options: see `gpuenergyd.job`.
    """
    with gpuenergyd.job(
        job,
        gpu_uuid=gpu_uuid,
        socket_path=socket_path,
        policy=policy,
        max_slowdown_ratio=max_slowdown_ratio,
        phases=phases,
    ) as joined:
        for batch in batches:
            with joined.iteration():
                yield batch


class StepMarks:
    """Marks the iterations of a loop that a framework runs, from the callbacks of the framework."""

    def __init__(
        self,
        job: str | None = None,
        *,
        gpu_uuid: str | None = None,
        socket_path: str | None = None,
        run_key: str | None = None,
        policy: str | None = None,
        max_slowdown_ratio: float | None = None,
        phases: bool = True,
    ) -> None:
        self._job = gpuenergyd.job(
            job,
            gpu_uuid=gpu_uuid,
            socket_path=socket_path,
            run_key=run_key,
            policy=policy,
            max_slowdown_ratio=max_slowdown_ratio,
            phases=phases,
        )
        self._iteration: AbstractContextManager[None] | None = None
        self._figures: JobFigures | None = None
        self._numbers: dict[str, float] = {}

    def begin(self) -> None:
        """Begin an iteration; an earlier one that did not end is discarded."""
        self._discard()
        self._iteration = self._job.iteration()
        self._iteration.__enter__()

    def end(self, num_tokens: int | None = None) -> None:
        """End the iteration, in which this process has handled so many tokens."""
        iteration, self._iteration = self._iteration, None
        if iteration is not None:
            self._job.set_num_tokens(num_tokens)
            iteration.__exit__(None, None, None)

    def numbers(self, price_per_kwh: float | None) -> dict[str, float]:
        """Return the measured figures of the job that a tracker can draw; the same object until newer ones arrive."""
        figures = self._job.figures
        if figures is not self._figures:
            self._figures = figures
            self._numbers = numbers_of(figures, price_per_kwh=price_per_kwh)
        return self._numbers

    def pause(self) -> None:
        """Suspend the job, e.g. for an evaluation or a checkpoint."""
        self._discard()
        self._job.pause()

    def close(self) -> None:
        """Leave the job at the end of training."""
        self._discard()
        self._job.__exit__(None, None, None)

    def _discard(self) -> None:
        iteration, self._iteration = self._iteration, None
        if iteration is not None:
            iteration.__exit__(RuntimeError, None, None)


class UnmarkedLoop:
    """A training loop without marks, joined after its first optimizer steps unless something else has joined.

    It leaves the job if something else joins later on the same GPU, e.g. a framework's trainer after the program's own
    loop. Its two hooks are never removed: torch raises if an optimizer hook adds or removes a hook.
    """

    def __init__(self, optimizers: Any) -> None:
        """Watch all optimizers, through the hooks of `torch.optim.optimizer`."""
        self._num_steps = 0
        self._is_decided = self._is_reported = False
        self._cycle = StepCycle()
        self._job: LoopJob | None = None
        optimizers.register_optimizer_step_pre_hook(self._before_step)
        optimizers.register_optimizer_step_post_hook(self._after_step)
        atexit.register(lambda: report_without_steps(self._num_steps))

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        phases = self._job.phases if self._job is not None else None
        return None if phases is None else phases.before_step(optimizer, args, kwargs)

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        try:
            if self._job is not None and self._job.has_given_way:
                self._job = None
            elif self._job is not None:
                self._job.after_step(optimizer)
                if self._cycle.num_without == STEPS_WITHOUT_CYCLE and not self._is_reported:
                    self._report_no_cycle()
            elif not self._is_decided:
                self._decide(self._cycle.step(optimizer))
        except Exception as error:  # noqa: BLE001  never raise into a training step
            self._is_decided, self._job = True, None
            logger.warning("gpuenergyd: this loop cannot be joined; training continues at full speed: %r", error)

    def _decide(self, turn: StepTurn) -> None:
        self._num_steps += 1
        if self._num_steps < _STEPS_BEFORE_JOINING:
            record_obstacle("the training ended after one step of an optimizer")
            return
        self._is_decided = has_clients() or self._num_steps > _LAST_STEP_TO_JOIN
        if self._is_decided:
            return
        if find_gpu_uuid() is not None:
            self._is_decided = True
            self._job = unmarked_job(self._cycle)
            self._job.join_after(turn)
        elif self._num_steps == _STEPS_BEFORE_JOINING:
            record_obstacle(f"the GPU of the training is not known ({missing_gpu_reason()})")

    def _report_no_cycle(self) -> None:
        self._is_reported = True
        delete_mark()
        logger.warning(
            "gpuenergyd: this loop is not followed: %s step in no regular turn, so its iterations are not known; mark"
            " them with gpuenergyd.job",
            count_text(self._cycle.num_optimizers, "optimizer"),
        )
