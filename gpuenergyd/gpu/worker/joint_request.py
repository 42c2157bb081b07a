"""A command for several GPUs: each GPU's thread does its part, and the last one to be done replies."""

import threading
from collections.abc import Callable, Mapping
from functools import partial

from gpuenergyd.errors import GpuEnergyError
from gpuenergyd.gpu.link.messages import Failed, Reply
from gpuenergyd.gpu.worker.threads.actuator import Actuator


def submit_jointly(
    actuators: Mapping[str, Actuator],
    *,
    each: Callable[[str], None],
    last: Callable[[], Reply],
    reply: Callable[[Reply], None],
) -> None:
    """Queue `each` on every GPU's thread, behind what it has to do already; the thread that ends last calls `last`.

    It is replied to once, with what `last` returns, or with `Failed` when a part fails or cannot be done.
    """
    pending, guard, is_over = set(actuators), threading.Lock(), False

    def end(outcome: Callable[[], Reply]) -> None:
        nonlocal is_over
        with guard:
            if is_over:
                return
            is_over = True
        try:
            answer = outcome()
        except GpuEnergyError as error:
            answer = Failed(str(error))
        reply(answer)

    def refuse(reason: str) -> None:
        end(lambda: Failed(reason))

    def run(gpu_uuid: str) -> None:
        try:
            each(gpu_uuid)
        except GpuEnergyError as error:
            refuse(str(error))
            return
        with guard:
            pending.discard(gpu_uuid)
            if pending:
                return
        end(last)

    if not actuators:
        end(last)
    for gpu_uuid, actuator in actuators.items():
        actuator.submit(partial(run, gpu_uuid), refuse)
