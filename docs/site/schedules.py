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
_MEGATRON_SETTINGS = {
    PAIRED: "Megatron-core, `virtual_pipeline_model_parallel_size`",
    COMBINED: "Megatron-core, `overlap_moe_expert_parallel_comm`",
}


def schedules_page() -> str:
    """Return the page with every schedule, its class in torch and an example of its order."""
    rows = (
        (
            code(name),
            _MEGATRON_SETTINGS[name] if name in _MEGATRON_SETTINGS else code(_TORCH_CLASSES[name]),
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
        table(("name", "class in torch.distributed.pipelining, or setting", "stages per rank"), rows),
        (
            "Extra microbatches in flight are an option of `1f1b`: `Schedule1F1BExtraInflight` of"
            " [gpuenergyd_trainers.torch_inflight](python-api.md#gpuenergyd_trainerstorch_inflight). Megatron-core with"
            " virtual stages runs `interleaved` where `overlap_p2p_comm` is on, and"
            f" `{PAIRED}` where it is off; microbatches are in groups of as many as there are ranks, its default. In"
            f" `{COMBINED}` a forward and a backward are one instruction, `FB`: from a table, it takes as long as both,"
            " less what `--overlap-saving` says, and as much energy. See"
            " [attach a training program](../how-to/attach-a-training-program.md#megatron-core)."
        ),
        "## Orders",
        (
            f"{_NUM_RANKS} ranks, {_NUM_MICROBATCHES} microbatches. `F` is a forward, `B` a full backward, `I` an input"
            " gradient and `W` a weight gradient; the number is the microbatch, and `.1` marks the second stage of a"
            " rank. `FB0.1+0` is the backward of microbatch 0 on the first stage of a rank, together with a forward on"
            " its second stage; in JSON the chunk of such an instruction is 64 times the forward's plus the backward's."
        ),
    ]
    for name in SCHEDULES:
        orders = make_schedule(name, _NUM_RANKS, _NUM_MICROBATCHES).orders
        lines = (f"rank {rank}:  {' '.join(map(_short, order))}" for rank, order in enumerate(orders))
        parts += [f"### {name}", block("\n".join(lines), "text")]
    return page("Schedules", *parts)


def _short(instruction: Instruction) -> str:
    return str(instruction).partition("@")[0]
