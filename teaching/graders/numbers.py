"""Numbers in a message: with as many digits as it takes to see that they differ."""

from math import isclose

MOST_DIGITS = 17  # tell any two floats apart


def apart(seen: float, right: float, digits: int = 4) -> tuple[str, str]:
    """Both numbers with the fewest digits, `digits` at least, with which they look different."""
    most = digits if isclose(seen, right, rel_tol=1e-12) else MOST_DIGITS  # no more than rounding
    for num_digits in range(digits, most + 1):
        texts = f"{seen:.{num_digits}g}", f"{right:.{num_digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


def a_not_b(seen: float, right: float, digits: int = 4) -> str:
    """Such as "35.0312, not 35.0308"."""
    return ", not ".join(apart(seen, right, digits))


def is_rounded(seen: float, right: float, most_digits: int = 8) -> bool:
    """Whether `seen` is `right` after round(right, n), and not `right` itself."""
    rounded = {round(right, digits) for digits in range(1, most_digits + 1)}
    return not isclose(seen, right, rel_tol=1e-12) and seen in rounded


ROUNDED = "that is the right number, rounded: return it as it is"
