"""A registration request: by default a job of one stage with one microbatch."""

from typing import Any


def one_stage_registration(gpu_uuid: str, job_name: str = "one stage", /, **changes: Any) -> dict[str, Any]:
    """Return the body of `POST /v1/ranks`, with changed or added fields."""
    return {
        "protocol_version": 1,
        "job_name": job_name,
        "run_key": "1",
        "pp_rank": 0,
        "num_pp_ranks": 1,
        "dp_rank": 0,
        "schedule_name": "1f1b",
        "num_microbatches": 1,
        "num_chunks": 1,
        "order": [["F", 0, 0], ["B", 0, 0]],
        "gpu_uuid": gpu_uuid,
        **changes,
    }
