"""What a client may tag its job with is bounded: it is kept for as long as the history."""

import pytest

from gpuenergyd.daemon.registration.tags import checked_tags
from gpuenergyd.errors import ProtocolError


def test_tags_are_kept_by_name() -> None:
    assert checked_tags([("user", "ada"), ("a", "")]) == (("a", ""), ("user", "ada"))


@pytest.mark.parametrize(
    ("tags", "says"),
    [
        ([(f"t{k}", "") for k in range(33)], "33 tags; at most 32"),
        ([("", "x")], "a name of 1 to 64"),
        ([("n" * 65, "x")], "a name of 1 to 64"),
        ([("n", "x" * 257)], "at most 256 characters"),
        ([("n", "a\nb")], "tag 'n': only printable"),
        ([("n", "1"), ("n", "2")], "two tags of one name"),
    ],
    ids=["many", "empty", "long name", "long value", "newline", "twice"],
)
def test_other_tags_are_refused_in_one_line(tags: list[tuple[str, str]], says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        checked_tags(tags)
