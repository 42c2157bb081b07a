"""The result of a job in words: savings and changes of speed with their confidence intervals.

A lower clock never makes a job faster. If iterations under plans took less time than at full speed, the text says
"no slower", because something else has changed.
"""

from collections.abc import Sequence

from gpuenergyd.core.pipeline.plan import SavingAdvice

UNKNOWN = "-"
NOT_SIGNIFICANT = "no significant saving"

_LEAST_ADVISED_RATIO = 0.005
"""Smaller savings are not worth suggesting an option."""

_LEAST_TENTHS_S = 0.1
"""Shorter times are shown with two significant digits."""

_HOW_TO_MEASURE = "to measure instead of predict, within some iterations: --max-slowdown 0.001"

_Ends = tuple[float, float]


def saving_text(saving_ratio: float | None) -> str:
    """Return an energy saving in words: 12.3 % less energy, 0.4 % more energy."""
    return _change_text(None if saving_ratio is None else -saving_ratio, "less energy", "more energy")


def slowdown_text(slowdown_ratio: float | None) -> str:
    """Return a change of iteration time in words: 0.5 % slower, or no slower."""
    return _no_slower(slowdown_ratio) or _change_text(slowdown_ratio, "", "slower")


def saving_span_text(interval: _Ends) -> str:
    """Return an interval of savings in words: 11.0 % to 12.1 % less energy, 0.2 % more to 1.0 % less energy."""
    low, high = interval
    return _span_text(low, high, "less", "more") + " energy"


def slowdown_span_text(interval: _Ends) -> str:
    """Return an interval of slowdowns in words: 0.1 % to 0.4 % slower, at most 0.1 % slower, or no slower."""
    low, high = interval
    if low >= 0.0:
        return _span_text(low, high, "slower", "")
    return _no_slower(high) or f"at most {slowdown_text(high)}"


def saving_with_interval(ratio: float, interval: _Ends | None, *, is_significant: bool | None) -> str:
    """Return a saving with its 95 % interval; without an amount if it is not significant."""
    span = f" (95 %: {saving_span_text(interval)})" if interval else ""
    if not is_significant:
        return NOT_SIGNIFICANT + span
    return saving_text(ratio) + span.replace(" energy)", ")")


def predicted_saving_text(ratio: float, interval: tuple[float | None, float | None]) -> str:
    """Return a predicted saving with its interval; "nothing to save" if it is not positive."""
    low, high = interval
    span = f" (range: {saving_span_text((low, high))})" if low is not None and high is not None and high > 0.0 else ""
    return (saving_text(ratio) if ratio > 0.0 else "nothing to save beyond the error of the prediction") + span


def slowdown_with_interval(ratio: float, interval: _Ends | None) -> str:
    """Return a change of iteration time with its 95 % interval."""
    return slowdown_text(ratio) + (f" (95 %: {slowdown_span_text(interval)})" if interval else "")


def cost_text(cost_s: float, ratio: float | None) -> str:
    """Return the time that the daemon has cost a training, in words: 0.3 s (0.02 %)."""
    share = "" if ratio is None else f" ({100 * ratio:.2f} %)"
    return f"{cost_s:.1f} s{share}" if cost_s >= _LEAST_TENTHS_S or not cost_s else f"{cost_s:.2g} s{share}"


def advice_text(advice: Sequence[SavingAdvice]) -> str:
    """Return what a larger permitted slowdown would save, one clause per value; empty if nothing."""
    worthwhile = [advised for advised in advice if advised.saving_ratio >= _LEAST_ADVISED_RATIO]
    text = "; ".join(map(_one_advice, worthwhile))
    is_vague = any(advised.is_range and not advised.is_measured for advised in worthwhile)
    return f"{text}; {_HOW_TO_MEASURE}" if is_vague else text


def _one_advice(advice: SavingAdvice) -> str:
    """Return one clause; without a single figure if the saving is only known as a wide range."""
    ratio, low, high = advice.max_slowdown_ratio, 100 * max(advice.low_ratio, 0.0), 100 * advice.high_ratio
    basis = "measured" if advice.is_measured else "predicted"
    if advice.is_range:
        saving = f"{low:.0f} to {high:.0f} % less energy ({basis}, not known better)"
    else:
        saving = f"{100 * advice.saving_ratio:.1f} % less energy ({low:.1f}-{high:.1f} %, {basis})"
    return f"at {100 * ratio:.3g} % slower this job would use {saving}: --max-slowdown {ratio:g}"


def _span_text(low: float, high: float, above: str, below: str) -> str:
    """Return an interval with words for signs; if both ends are negative, the one nearer to 0 comes first."""
    ends = [round(100 * end, 1) for end in (low, high)]
    if ends[0] < 0 < ends[1]:
        return f"{-ends[0]:.1f} % {below} to {ends[1]:.1f} % {above}"
    near, far = sorted(abs(end) for end in ends)
    return f"{near:.1f} % to {far:.1f} % {below if ends[0] < 0 else above}"


def _no_slower(ratio: float | None) -> str:
    return "no slower" if ratio is not None and ratio < 0.0 else ""


def _change_text(ratio: float | None, less: str, more: str) -> str:
    if ratio is None:
        return UNKNOWN
    percent = round(ratio * 100, 1)
    return f"{abs(percent):.1f} % {less if percent < 0 else more}"
