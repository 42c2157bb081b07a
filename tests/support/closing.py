"""What the end of a test closes, on the event loop on which the test has used it."""

from collections.abc import Awaitable, Callable

AT_END: list[Callable[[], Awaitable[None]]] = []


async def close_all() -> None:
    """Close what was opened, last things first."""
    while AT_END:
        await AT_END.pop()()
