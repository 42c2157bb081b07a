"""The members of a pipeline across hosts, and the keys that the pipeline uses in the job's store."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PipelinePlace:
    """The position of a rank in its pipeline; all ranks of a stage, here called tensor-parallel, follow one plan."""

    pp_rank: int
    num_pp_ranks: int
    tp_rank: int = 0
    num_tp_ranks: int = 1
    dp_rank: int = 0
    """A number that differs between the replicas of the pipeline."""

    @property
    def name(self) -> str:
        """The name of the rank among the members of its pipeline."""
        return member_name(self.pp_rank, self.tp_rank)

    @property
    def is_leader(self) -> bool:
        """Whether this rank's daemon plans for the whole pipeline."""
        return self.pp_rank == 0 and self.tp_rank == 0

    @property
    def members(self) -> tuple[tuple[int, int], ...]:
        """All ranks of the pipeline, as pairs of pipeline and tensor-parallel rank."""
        return tuple((pp, tp) for pp in range(self.num_pp_ranks) for tp in range(self.num_tp_ranks))

    @property
    def agreement_key(self) -> str:
        """The key under which the leader publishes plan windows."""
        return f"{self.dp_rank}/head"

    @property
    def news_key(self) -> str:
        """The key of a counter of all reports that carrying ranks have published."""
        return f"{self.dp_rank}/news"

    def report_key(self, pp_rank: int, tp_rank: int) -> str:
        """Return the key under which a carrying rank reports to the leader, for the ranks of its stage on its host."""
        return f"{self.dp_rank}/up/{member_name(pp_rank, tp_rank)}"

    def facts_key(self, pp_rank: int, tp_rank: int) -> str:
        """Return the key of the facts that the reports of a carrying rank refer to."""
        return f"{self.dp_rank}/facts/{member_name(pp_rank, tp_rank)}"

    def slice_key(self, plan_id: str, pp_rank: int) -> str:
        return f"{self.dp_rank}/plan/{plan_id}/{pp_rank}"


def member_name(pp_rank: int, tp_rank: int) -> str:
    return f"{pp_rank}.{tp_rank}"
