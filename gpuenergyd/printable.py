"""Makes text from users, files and other programs harmless where it is shown: in terminals, logs and tables."""


def printable_line(text: str) -> str:
    """Return a text in one line: control characters, and those that reverse the direction of text, as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
