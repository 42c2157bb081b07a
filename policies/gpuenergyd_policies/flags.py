"""Options of policies as they follow a policy's name: `bubble-aware:trials=false`, `power-limit:watts=300`."""

from collections.abc import Mapping

from gpuenergyd.errors import UsageError


def flags_of(policy: str, options: Mapping[str, str], defaults: Mapping[str, bool]) -> dict[str, bool]:
    """Return all flags of a policy by name, given or default.

    Raises:
        UsageError: an option is not among `defaults`, or its value is neither true nor false.
    """
    if unknown := sorted(options.keys() - defaults.keys()):
        valid = f"valid is {next(iter(defaults))}" if len(defaults) == 1 else f"valid are {' and '.join(defaults)}"
        raise UsageError(f"policy {policy} has no option {unknown[0]!r}; {valid}")
    for name, text in options.items():
        if text.lower() not in {"true", "false"}:
            raise UsageError(f"{name} = {text}: must be true or false")
    return {name: options.get(name, f"{default}").lower() == "true" for name, default in defaults.items()}


def number_of(policy: str, options: Mapping[str, str], name: str, low: int, high: int, *, example: int) -> int:
    """Return the whole number that is a policy's only option.

    Raises:
        UsageError: there is none, it is out of range, or there is another option.
    """
    if unknown := sorted(options.keys() - {name}):
        raise UsageError(f"policy {policy} has no option {unknown[0]!r}; valid is {name}")
    given = options.get(name, "")
    is_number = given.isdecimal() and given.isascii() and len(given) <= len(str(high))
    if not is_number or not low <= int(given) <= high:
        raise UsageError(
            f"policy {policy}: {name} = {given or 'missing'}: must be a whole number from {low} to {high},"
            f" e.g. {policy}:{name}={example}"
        )
    return int(given)
