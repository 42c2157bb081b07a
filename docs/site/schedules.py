"""Reference of pipeline schedules, generated from the schedules that the planner knows."""

from docs.site.markdown import block, code, page, table
from gpuenergyd.core.pipeline.graph import Instruction
from gpuenergyd.core.pipeline.megatron_orders import COMBINED, PAIRED
from gpuenergyd.core.pipeline.schedules import SCHEDULES, make_schedule

_NUM_RANKS, _NUM_MICROBATCHES = 2, 4
_TORCH_CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "zb-h1": "",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def schedules_page() -> str:
    """Return the page with every schedule, its class in torch and an example of its order."""
    rows = (
        (
            code(name),
            code(_TORCH_CLASSES[name]),
            ("any, default " if family.takes_any_num_chunks else "") + str(family.default_num_chunks),
        )
        for name, family in SCHEDULES.items()
    )
    parts = [
        (
            "A schedule is the order in which each rank computes its instructions. These names are valid for"
            " `gpuenergyd plan --schedule`. Trainers report the order that they really execute, so a schedule with"
            " another order is planned too: it is learned from two equal iterations and is called `learned`."
        ),
        table(("name", "class in torch.distributed.pipelining", "stages per rank"), rows),
        (
            "Extra microbatches in flight are an option of `1f1b`: `Schedule1F1BExtraInflight` of"
            " [gpuenergyd_trainers.torch_inflight](python-api.md#gpuenergyd_trainerstorch_inflight). Megatron-core also"
            f" registers `{PAIRED}` and `{COMBINED}`, see"
            " [attach a training program](../how-to/attach-a-training-program.md#megatron-core)."
        ),
        "## Orders",
        (
            f"{_NUM_RANKS} ranks, {_NUM_MICROBATCHES} microbatches. `F` is a forward, `B` a full backward, `I` an input"
            " gradient and `W` a weight gradient; the number is the microbatch, and `.1` marks the second stage of a"
            " rank."
        ),
    ]
    for name in SCHEDULES:
        orders = make_schedule(name, _NUM_RANKS, _NUM_MICROBATCHES).orders
        lines = (f"rank {rank}:  {' '.join(map(_short, order))}" for rank, order in enumerate(orders))
        parts += [f"### {name}", block("\n".join(lines), "text")]
    return page("Schedules", *parts)


def _short(instruction: Instruction) -> str:
    chunk = f".{instruction.chunk_index}" if instruction.chunk_index else ""
    return f"{instruction.kind}{instruction.microbatch_index}{chunk}"
