"""Clock requests as a training process sends them."""

from gpuenergyd.wire.clock_request import RankClockRequest, pack_clock_request


def encode_clock_request(rank_request: RankClockRequest) -> bytes:
    """Return the datagram of a request."""
    request = rank_request.request
    return pack_clock_request(
        rank_request.sequence & 0xFFFFFFFF,
        rank_request.token,
        request.plan_epoch,
        request.sm_clock_mhz,
        request.later_sm_clock_mhz,
        request.later_at_mono_ns,
        request.sent_mono_ns,
    )
