"""Wrap text for a terminal, with each command that it quotes on one line, to be copied."""

import re
import textwrap

COMMAND = re.compile(
    r"`[^`\n]+`"
    r"|(?:minitron|torchrun|make) [^;,()\n]*?--use(?: \d+\.\d+)+"
    r"|minitron (?:check|hint|reset|solution)(?: \d+(?:\.\d+)?)?(?: --give-up| --level \d)?"
    r"|minitron (?:status|doctor)"
)
GLUE = "\N{NO-BREAK SPACE}"
"""What textwrap does not take for a space; the text that is printed has spaces again."""


def fill(text: str, width: int, indent: str = "", subsequent_indent: str = "") -> str:
    """Return `text` in lines of at most `width` characters, longer only for a longer command."""
    glued = COMMAND.sub(lambda found: found[0].replace(" ", GLUE), text)
    return textwrap.fill(
        glued,
        width,
        initial_indent=indent,
        subsequent_indent=subsequent_indent,
        break_long_words=False,
        break_on_hyphens=False,
    ).replace(GLUE, " ")
