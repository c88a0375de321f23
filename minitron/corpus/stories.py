"""Little stories from a seeded grammar: fluent English within seconds of training.

    There was a kind boy named Ben. Ben had a shiny kite. One day, Ben took the shiny kite to the
    park. His friend Mia was waiting there. But soon he broke the shiny kite. He felt sad ...

A model learns the sentences first, and then to copy the name and the thing from earlier in the
story. The grammar (`story_grammar.py`) is small enough to be read by an ideal reader, `surprisals`,
which knows the probability of every next word: it checks a model's stories and gives the lowest
loss that any model can reach.
"""

import functools
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from minitron.corpus.folder import (
    END,
    require_space,
    start_corpus,
    write_corpus_info,
    write_split,
)
from minitron.corpus.story_grammar import (
    LINES,
    TEMPLATES,
    UNKNOWN,
    VARIABLE_OF,
    VARIABLES,
    VOCABULARY,
    entropy_per_token,
    expected_length,
    sample_story,
)
from minitron.dataset import TOKEN_BYTES
from minitron.system.progress import Progress

TOKENS_AT_ONCE = 1_000_000


def write_stories(folder: Path, num_tokens: int = 4_000_000, seed: int = 0) -> dict:
    """Write training shards of `num_tokens` tokens, a twentieth as many to validate, and the rest.

    Returns what `corpus.json` says: among it `entropy_per_token` and, by sequence length,
    `entropy_in_window`, both in nats per token.
    """
    folder, num_val = Path(folder), max(1, num_tokens // 20)
    require_space(folder, TOKEN_BYTES * (num_tokens + num_val))
    start_corpus(folder, "stories")
    # Even seeds train, odd ones validate: no seed's validation text is another's training text.
    with Progress(total=num_tokens + num_val, desc="telling stories", unit_scale=True) as bar:
        train_tokens = write_split(folder, "train", _story_tokens(num_tokens, 2 * seed, bar))
        val_tokens = write_split(folder, "val", _story_tokens(num_val, 2 * seed + 1, bar))
    story_tokenizer().save(str(folder / "tokenizer.json"))
    return write_corpus_info(
        folder,
        "stories",
        len(VOCABULARY),
        train_tokens=train_tokens,
        val_tokens=val_tokens,
        seed=seed,
        entropy_per_token=entropy_per_token(),
        entropy_in_window={str(S): entropy_in_window(S) for S in (32, 64, 128, 256)},
    )


def _story_tokens(num_tokens: int, seed: int, bar: Progress) -> Iterator[np.ndarray]:
    number = {word: index for index, word in enumerate(VOCABULARY)}
    rng, num_left = random.Random(seed), num_tokens
    while num_left > 0:
        tokens = []
        while len(tokens) < min(num_left, TOKENS_AT_ONCE):
            tokens += [number[word] for word in sample_story(rng)]
        part = np.array(tokens[:num_left], dtype=np.uint16)
        num_left -= len(part)
        bar.update(len(part))
        yield part


def story_tokenizer() -> Tokenizer:
    """Build the tokenizer with one token per word, comma, full stop and `<end>`."""
    vocabulary = {word: index for index, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Split(Regex("[.,]"), "isolated"),
        ]
    )
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)  # attaches punctuation
    tokenizer.add_special_tokens([END, UNKNOWN])
    return tokenizer


def detokenize(words: list[str]) -> str:
    """Join words into text, punctuation attached, one story per line."""
    text = " ".join(words)
    return re.sub(r" ([.,])", r"\1", text).replace(f" {END} ", f" {END}\n")


def split_words(text: str) -> list[str]:
    """Split text into the grammar's words, the inverse of `detokenize`."""
    return re.findall(rf"{END}|[.,]|[^\s.,<]+|<", text)


# --- Reading: what a reader who knows the grammar expects next ------------------------------------
# A hypothesis is (probability, place in the grammar, candidates left of each variable). Given the
# place, the variables are independent and uniform over the candidates left, so this is exact.


def _read(token: str, word: str, candidates: dict) -> tuple[float, dict]:
    """Probability that a template's `token` reads `word`, and the candidates that then remain."""
    if token not in VARIABLE_OF:
        return float(token == word), candidates

    variable = VARIABLE_OF[token]
    before = candidates.get(variable, VARIABLES[variable])
    after = [slots for slots in before if slots[token] == word]
    return len(after) / len(before), {**candidates, variable: after}


@functools.cache
def _starts(line: int) -> list[tuple[float, tuple]]:
    """Where the text may go on at the start of a line, with probabilities: (line, template, 0)."""
    starts = []
    for index, template in enumerate(LINES[line]):
        ahead = [(1.0, (line, index, 0))] if template else _starts(line + 1)
        starts += [(probability / len(LINES[line]), place) for probability, place in ahead]
    return starts


def _after(place: tuple) -> list[tuple[float, tuple]]:
    line, index, position = place
    if position + 1 < len(LINES[line][index]):
        return [(1.0, (line, index, position + 1))]
    return _starts((line + 1) % len(LINES))


def _anywhere() -> list[tuple[float, tuple]]:
    """Where a text cut at a random token opens: each token of a template as often as it occurs."""
    return [
        (1 / len(line) / expected_length(), (i, index, position))
        for i, line in enumerate(LINES)
        for index, template in enumerate(line)
        for position in range(len(template))
    ]


def surprisals(words: list[str], opening: list[tuple[float, tuple]] | None = None) -> list[float]:
    """Return -log of the probability of each word given those before it, in nats.

    The text opens at the start of a story unless `opening` says otherwise. The list ends with
    infinity at the first word that no story continues with.
    """
    hypotheses = [(p, place, {}) for p, place in opening or _starts(0)]
    result = []
    for word in words:
        fitting = []
        for prior, (line, index, position), candidates in hypotheses:
            p, candidates = _read(LINES[line][index][position], word, candidates)
            if p > 0:
                fitting.append((prior * p, (line, index, position), candidates))

        total = sum(p for p, _, _ in fitting)
        if total == 0:
            return result + [math.inf]
        result.append(-math.log(total))
        hypotheses = [
            (p / total * ahead, place, {} if word == END else candidates)
            for p, old, candidates in fitting
            for ahead, place in _after(old)
        ]
    return result


def is_grammatical(sentence: list[str]) -> bool:
    """Return whether some template reads this sentence, its slots agreeing with each other."""
    return any(_fits(template, sentence) for template in TEMPLATES if template != [END])


def _fits(template: list[str], sentence: list[str]) -> bool:
    if len(template) != len(sentence):
        return False
    candidates = {}
    for token, word in zip(template, sentence, strict=True):
        p, candidates = _read(token, word, candidates)
        if p == 0:
            return False
    return True


def is_consistent(story: list[str]) -> bool:
    """Return whether the grammar can produce this story (without `<end>`): order, names, things."""
    return math.isfinite(sum(surprisals([*story, END]))) and END not in story


def grammatical_share(*texts: str) -> tuple[float, float]:
    """Return the shares of sentences that are grammatical and of stories that are consistent.

    Each text opens at the start of a story; what follows its last full stop, and the story after
    its last `<end>`, are cut short and not counted. NaN where nothing is left to count.
    """
    sentences, told = [], []
    for text in texts:
        *whole, rest = [story.split() for story in " ".join(split_words(text)).split(END)]
        told += [story for story in whole if story]  # a text may open with <end>
        sentences += [sentence for story in whole for sentence in _sentences(story)]
        sentences += [sentence for sentence in _sentences(rest) if sentence[-1] == "."]
    return _share(is_grammatical, sentences), _share(is_consistent, told)


def _sentences(words: list[str]) -> list[list[str]]:
    return [sentence.split() for sentence in re.findall(r"[^.]+\.?|\.", " ".join(words))]


def _share(test, items: list) -> float:
    return sum(map(test, items)) / len(items) if items else math.nan


@functools.cache
def entropy_in_window(sequence_length: int, num_tokens: int = 40_000, seed: int = 0) -> float:
    """Return the lowest possible loss, nats per token, of a model that sees samples of S+1 tokens.

    A sample opens anywhere in a story, so the model pays again for the names and things that it
    has not seen, and at first for not knowing where it is. The reader is ideal and exact; what
    is estimated is the mean over samples, from `num_tokens` tokens of a seeded stream cut as
    `TokenDataset` cuts it. The sampling error is about 1 %, in either direction.
    """
    stream = _stream(seed)
    opening = _anywhere()
    total, num_windows = 0.0, max(1, num_tokens // sequence_length)
    window = [next(stream)]
    for _ in range(num_windows):
        window = window[-1:] + [next(stream) for _ in range(sequence_length)]
        total += sum(surprisals(window, opening)[1:])  # the first token is only an input
    return total / (num_windows * sequence_length)


def _stream(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    while True:
        yield from sample_story(rng)
