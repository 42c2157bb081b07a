"""Names of a training's jobs for people."""

import pytest

from gpuenergyd.core.job.replica_name import replica_name


@pytest.mark.parametrize(
    ("num_ranks", "dp_rank", "tags", "name"),
    [
        (1, 0, {}, "gpt"),
        (1, 0, {"world_size": "1"}, "gpt"),
        (1, 0, {"world_size": "2"}, "gpt rank 0"),
        (1, 1, {"world_size": "2"}, "gpt rank 1"),
        (1, 3, {}, "gpt rank 3"),
        (4, 0, {"world_size": "4"}, "gpt"),
        (4, 0, {"world_size": "8"}, "gpt replica 0"),
        (4, 1, {"world_size": "8"}, "gpt replica 1"),
        (4, 0, {"world_size": "many"}, "gpt"),
        (1, 0, {"world_size": "4", "pp_rank": "2"}, "gpt rank 2"),
        (1, 1, {"world_size": "8", "pp_rank": "2"}, "gpt replica 1 rank 2"),
    ],
)
def test_a_job_has_its_rank_where_the_training_has_several(
    num_ranks: int, dp_rank: int, tags: dict[str, str], name: str
) -> None:
    assert replica_name("gpt", num_ranks=num_ranks, dp_rank=dp_rank, tags=tags.items()) == name
