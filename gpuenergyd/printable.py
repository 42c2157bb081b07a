"""Makes text from users, files and other programs safe to show in terminals, logs and tables."""


def printable_line(text: str) -> str:
    """Return a text as one line, with control characters and those that reverse text direction escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
