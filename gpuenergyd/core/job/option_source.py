"""Where the policy and the permitted slowdown of a job come from."""

from collections.abc import Mapping
from enum import StrEnum


class OptionSource(StrEnum):
    """Where the policy or the permitted slowdown of a job comes from, in order of precedence."""

    OPERATOR = "operator"
    ARGUMENT = "argument"
    ENVIRONMENT = "environment"
    DAEMON = "daemon"


SOURCE_TEXTS: Mapping[str, str] = {
    OptionSource.OPERATOR: "ordered by an operator",
    OptionSource.ARGUMENT: "set by the program",
    OptionSource.ENVIRONMENT: "from the environment",
    OptionSource.DAEMON: "the daemon's default",
}
