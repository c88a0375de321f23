"""The grammar of the stories: its words, its lines, and what follows from them exactly.

A story is one choice per line of `LINES`, all equally likely, and one choice per variable (who,
what, where, ...), made once and then repeated. Every choice shows in the text, so a text has one
derivation, and the entropy of the stories is the entropy of the choices.
"""

import math
import random

from minitron.corpus.folder import END

UNKNOWN = "<unknown>"
"""Stands for a word of a prompt that no story holds."""

BOYS = ("Ben", "Tom", "Max", "Sam")
GIRLS = ("Mia", "Lily", "Anna", "Zoe")
ADJECTIVES = ("shiny", "red", "blue", "old", "tiny", "wooden", "golden", "orange", "yellow", "ugly")
OBJECTS = ("book", "ball", "hat", "kite", "drum", "boat", "cup", "bag", "bell", "lamp")
PLACES = ("park", "market", "beach", "forest", "river", "garden", "school", "farm")
FEELINGS = ("sad", "upset", "worried", "afraid")
TROUBLES = (
    ("lost", "find", "found"),
    ("broke", "fix", "fixed"),
    ("soaked", "dry", "dried"),
    ("stained", "wash", "washed"),
)


def _people(hero: str, friend: str) -> dict[str, str]:
    boy = ("boy", "he", "He", "him", "his", "His")
    girl = ("girl", "she", "She", "her", "her", "Her")
    forms = ("{boy}", "{he}", "{He}", "{him}", "{his}", "{His}")
    return {
        "{hero}": hero,
        "{friend}": friend,
        **dict(zip(forms, boy if hero in BOYS else girl, strict=True)),
    }


def _adjective(adjective: str) -> dict[str, str]:
    return {"{a}": "an" if adjective[0] in "aeiou" else "a", "{adjective}": adjective}


# Each variable is one of its candidates; a candidate fills several slots, which thus agree.
VARIABLES: dict[str, list[dict[str, str]]] = {
    "people": [
        _people(hero, friend) for hero in BOYS + GIRLS for friend in BOYS + GIRLS if friend != hero
    ],
    "adjective": [_adjective(word) for word in ADJECTIVES],
    "object": [{"{object}": word} for word in OBJECTS],
    "place": [{"{place}": word} for word in PLACES],
    "trouble": [
        dict(zip(("{lost}", "{find}", "{found}"), words, strict=True)) for words in TROUBLES
    ],
    "feeling": [{"{feeling}": word} for word in FEELINGS],
}
VARIABLE_OF = {slot: name for name, found in VARIABLES.items() for slot in found[0]}

# The same names and pairs of words return in most sentences: a model that has learned to copy them
# pays less in each, and its loss falls visibly within the first minute.
# An empty template leaves the line out. Two rules keep derivations unique: no sentence fits two
# templates, and each variable is told in full by every template of some line.
LINES: tuple[tuple[list[str], ...], ...] = tuple(
    tuple(template.split() for template in line)
    for line in (
        (
            "Once there was a {boy} named {hero} .",
            "{hero} was a little {boy} .",
            "There was a kind {boy} named {hero} .",
        ),
        (
            "{hero} had {a} {adjective} {object} .",
            "{hero} loved {his} {adjective} {object} .",
            "{His} favorite thing was {a} {adjective} {object} .",
        ),
        (
            "",
            "The {adjective} {object} was a gift from {his} mother .",
            "{hero} played with the {adjective} {object} every day .",
        ),
        (
            "One day , {hero} took the {adjective} {object} to the {place} .",
            "One morning , {hero} went to the {place} with the {adjective} {object} .",
            "The next day , {hero} carried the {adjective} {object} to the {place} .",
        ),
        (
            "At the {place} , {hero} met {his} friend {friend} .",
            "{His} friend {friend} was waiting there .",
            "{hero} saw {friend} and waved .",
        ),
        (
            "But soon {he} {lost} the {adjective} {object} .",
            "Then {hero} {lost} the {adjective} {object} .",
            "While they played , {hero} {lost} the {adjective} {object} .",
        ),
        (
            "{hero} was very {feeling} .",
            "{He} felt {feeling} and sat down .",
            "{He} was so {feeling} that {he} cried .",
        ),
        (
            "{friend} helped {hero} {find} the {adjective} {object} .",
            "Together they {found} the {adjective} {object} .",
            "So {friend} {found} the {adjective} {object} for {him} .",
        ),
        (
            "",
            "{hero} was not {feeling} anymore .",
            "{hero} thanked {friend} and took the {adjective} {object} home .",
            "They stayed at the {place} until dark .",
            "From then on , {hero} took good care of the {adjective} {object} .",
        ),
        (END,),
    )
)
TEMPLATES = [template for line in LINES for template in line if template]
VOCABULARY = [END, UNKNOWN] + sorted(
    {word for template in TEMPLATES for word in template if word not in VARIABLE_OF}.union(
        *(slots.values() for found in VARIABLES.values() for slots in found)
    )
    - {END}
)


def sample_story(rng: random.Random) -> list[str]:
    """Draw one story: its words, `<end>` last. The same on every Python for the same `rng` state.

    Only `rng.random()` is called; the other methods have changed between Python versions.
    """

    def choose(options):
        return options[int(rng.random() * len(options))]

    slots = {}
    for found in VARIABLES.values():
        slots |= choose(found)
    return [slots.get(word, word) for line in LINES for word in choose(line)]


def expected_length() -> float:
    """Return the expected number of tokens of a story, `<end>` included."""
    return sum(sum(map(len, line)) / len(line) for line in LINES)


def entropy_per_token() -> float:
    """Return the exact entropy rate of the stream of stories, nats per token.

    The choices are independent and uniform, and text and choices determine each other: the
    entropy of a story is the sum of log(number of options), divided here by the expected length.
    No model can have a lower expected loss, however much context it sees.
    """
    options = [len(line) for line in LINES] + [len(found) for found in VARIABLES.values()]
    return sum(map(math.log, options)) / expected_length()
