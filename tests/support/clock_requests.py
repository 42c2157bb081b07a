"""Clock requests as a training process sends them."""

from gpuenergyd.core.clock_request import TimedClock
from gpuenergyd.wire.clock_request import RankClockRequest, pack_clock_request, pack_further_clocks


def encode_clock_request(rank_request: RankClockRequest) -> bytes:
    request = rank_request.request
    first = request.later[0] if request.later else TimedClock(0, 0)
    return pack_clock_request(
        rank_request.sequence & 0xFFFFFFFF, rank_request.token, request.plan_epoch, request.sm_clock_mhz,
        first.sm_clock_mhz, first.at_mono_ns, request.sent_mono_ns,
    ) + pack_further_clocks(request.later[1:], request.sent_mono_ns)  # fmt: skip
