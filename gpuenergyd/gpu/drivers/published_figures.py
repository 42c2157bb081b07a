"""Published figures of GPU models that drivers do not report: power while waiting for a peer, and switch latency."""


def published_blocking_power_w(model_name: str) -> float | None:
    """Return the published power of a waiting GPU at the maximum clock (Perseus, A100 and A40), or None."""
    words = model_name.replace("-", " ").split()
    if any(word.startswith("A100") for word in words):
        return 83.64
    return 70.38 if "A40" in words else None


def published_switch_latency_s(model_name: str) -> float | None:
    """Return the published upper range of the switch latency of a GPU by its model name, or None.

    A800 and A100 share a die: on one A800 the call took 13 ms at the 99th percentile and the clock settled 0.9 ms
    later. For V100, calls of typically 10 to 20 ms are reported (ml-energy/zeus, issue 29).
    """
    words = model_name.replace("-", " ").split()
    if any(word.startswith(("A100", "A800")) for word in words):
        return 0.014
    return 0.02 if any(word.startswith("V100") for word in words) else None
