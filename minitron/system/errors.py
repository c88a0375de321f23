"""What a user can get wrong, as data: the problem, what would mend it, which field it is about."""

import re

LONGEST_WORD = 400  # of a message; a path may have 255 characters between two slashes
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # a name may hold a new line


class ConfigError(ValueError):
    """Something the user typed cannot work. The command line prints it as one line, exit code 2.

    `problem` says what was wrong, with the numbers; each of `remedies` is one way to mend it.
    `field` is the option it is about, such as "parallel.tp". Errors of one `kind` differ in their
    numbers only: count them by it, and tell the user the error itself.
    """

    def __init__(self, problem: str, *remedies: str, field: str = "", kind: str = ""):
        super().__init__(problem, *remedies)
        self.problem, self.remedies = str(problem), remedies
        self.field, self.kind = field, kind or self.problem
        self.where = ""

    def on_rank(self, rank: int) -> "ConfigError":
        """Return this error, which also says on which rank it was raised."""
        self.where = f" (on rank {rank})"
        return self

    @property
    def remedy(self) -> str:
        return "; ".join(self.remedies)

    def __str__(self) -> str:
        joint = "; " if ": " in self.problem else ": "  # a problem may explain itself
        parts = (one_line(part) for part in (self.problem, self.remedy) if part)
        return joint.join(parts) + self.where


def require(condition: bool, problem: str, *remedies: str, field: str = "", kind: str = "") -> None:
    """Raise a ConfigError unless `condition` holds."""
    if not condition:
        raise ConfigError(problem, *remedies, field=field, kind=kind)


def one_line(text: str) -> str:
    """Return the text on one line that a terminal can show, its longest words cut short."""
    escaped = UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)
    return re.sub(rf"\S{{{LONGEST_WORD},}}", shortened, escaped)


def shortened(word: re.Match) -> str:
    return f"{word[0][:20]}...{word[0][-20:]} ({len(word[0]):,} characters)"
