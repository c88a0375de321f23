import hashlib
import itertools
import math
import random

import numpy as np
import pytest

from minitron.corpus import stories
from minitron.corpus.folder import END, load_tokenizer, read_corpus_info
from minitron.corpus.stories import (
    detokenize,
    entropy_in_window,
    grammatical_share,
    is_consistent,
    is_grammatical,
    split_words,
    surprisals,
    write_stories,
)
from minitron.corpus.story_grammar import (
    LINES,
    TEMPLATES,
    VARIABLE_OF,
    VARIABLES,
    VOCABULARY,
    entropy_per_token,
    expected_length,
    sample_story,
)
from minitron.dataset import TokenDataset, open_shard
from minitron.system.progress import Progress

STORY = (
    "There was a kind boy named Ben. Ben had an old kite. One day, Ben took the old kite to the "
    "park. His friend Mia was waiting there. But soon he broke the old kite. Ben was very sad. "
    "So Mia fixed the old kite for him. Ben was not sad anymore."
)


def sample(number: int, seed: int = 0) -> list[list[str]]:
    rng = random.Random(seed)
    return [sample_story(rng) for _ in range(number)]


# --- The stories ----------------------------------------------------------------------------------


def test_the_stories_are_the_same_on_every_python():
    text = "\n".join(detokenize(story) for story in sample(200))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "a5a9045e202afeab"


def test_only_random_is_called():
    class Fixed:
        def random(self):
            return 0.0

    assert sample_story(Fixed())[:6] == ["Once", "there", "was", "a", "boy", "named"]


def test_stories_have_the_size_that_was_meant():
    assert 80 <= len(VOCABULARY) <= 150
    for story in sample(500):
        assert story[-1] == END and story.count(END) == 1
        assert 6 <= story.count(".") <= 9
        assert 50 <= len(story) <= 90
        assert set(story) <= set(VOCABULARY)


def test_text_and_words_are_inverse():
    for story in sample(50):
        assert split_words(detokenize(story)) == story
    assert detokenize(["Ben", ",", "he", "ran", ".", END, "Mia", "."]) == "Ben, he ran. <end>\nMia."


# --- The checker ----------------------------------------------------------------------------------


def test_every_sampled_story_passes():
    for story in sample(300):
        assert is_consistent(story[:-1])
    assert grammatical_share(*(detokenize(story) for story in sample(300))) == (1, 1)


@pytest.mark.parametrize(
    "sentence",
    [
        "Ben had a old kite .",  # the article
        "Ben had an shiny kite .",
        "Ben had an kite old .",  # words swapped
        "Ben had an old .",  # a word missing
        "Ben had an old kite",  # no full stop
        "Ben had an old kite . .",
        "Ben had an old Ben .",  # a name in the place of a thing
        "One day , Ben took the old kite to the Mia .",  # a name in the place slot
        "Once there was a boy named Mia .",  # boy and name disagree
        "Once there was a girl named Ben .",
        "Ben helped Ben fix the old kite .",  # two people are two people
        "Mia helped Ben fixed the old kite .",  # the verb's form
        "he was very sad .",
        "Ben was very kite .",
        "<end>",
        "",
    ],
)
def test_a_broken_sentence_is_ungrammatical(sentence):
    assert not is_grammatical(sentence.split())


def test_a_sentence_alone_may_be_about_anyone():
    for sentence in split_words(STORY), split_words(STORY.replace("Ben", "Tom")):
        text = " ".join(sentence)
        for part in text.split(" ."):
            assert part == "" or is_grammatical([*part.split(), "."])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("So Mia", "So Lily"),  # the friend changes
        ("Ben was very", "Tom was very"),  # the hero changes
        ("took the old kite", "took the red kite"),  # the thing changes
        ("broke the old kite", "broke the old drum"),
        ("fixed", "found"),  # what was broken is found
        ("not sad", "not afraid"),
        ("for him", "for her"),  # the pronoun
        ("His friend", "Her friend"),
        ("Ben had an old kite. ", ""),  # a sentence missing
        (
            "Ben was very sad. So Mia fixed the old kite for him.",
            "So Mia fixed the old kite for him. Ben was very sad.",
        ),  # the order
        ("Ben was not sad anymore.", "Ben was not sad anymore. Ben was not sad anymore."),
        ("friend Mia", "friend Ben"),  # a friend of oneself
    ],
)
def test_a_broken_story_is_inconsistent_though_its_sentences_are_grammatical(old, new):
    assert old in STORY
    broken = STORY.replace(old, new)
    assert grammatical_share(f"{STORY} <end>") == (1, 1)
    assert grammatical_share(f"{broken} <end>") == (1, 0)


def test_a_story_needs_its_end_and_only_one():
    words = split_words(STORY)
    assert not is_consistent([])
    assert not is_consistent(words[:-9])
    assert not is_consistent([*words, END])
    assert is_consistent(split_words(STORY.replace(" Ben was not sad anymore.", "")))


def test_shares_count_only_what_is_complete():
    good, bad = "Ben had an old kite.", "Ben had a old kite."
    share, none = grammatical_share(f"{good} {bad} {good} Ben had an")
    assert share == pytest.approx(2 / 3)
    assert math.isnan(none)

    assert grammatical_share(f"{STORY} <end> {STORY} Ben") == (1, 1)
    assert grammatical_share(f"<end>\n{STORY} <end>\n{STORY.replace('fixed', 'found')} <end>") == (
        1,
        0.5,
    )
    assert grammatical_share(f"{good} Ben had <end> {good}")[0] == pytest.approx(2 / 3)
    assert all(map(math.isnan, grammatical_share("Ben had an")))
    # Texts are separate: the end of one is not the beginning of the next.
    assert grammatical_share("Ben had an", "old kite. Ben had an old kite.")[0] == 0.5


# --- The lowest possible loss ---------------------------------------------------------------------


def test_within_a_line_different_choices_give_different_sentences():
    """Brute force: every template with everything that its slots can say."""
    for line in LINES:
        seen = set()
        for template in line:
            variables = sorted({VARIABLE_OF[word] for word in template if word in VARIABLE_OF})
            told = set()
            for found in itertools.product(*(VARIABLES[name] for name in variables)):
                slots = merged(found)
                told.add(tuple(slots.get(word, word) for word in template))
            assert seen.isdisjoint(told)
            seen |= told


def test_different_derivations_tell_different_stories():
    """Brute force over a reduced grammar: two templates a line, three variables free."""
    free = {
        name: found[:: len(found) - 1] if name in ("people", "adjective", "trouble") else found[:1]
        for name, found in VARIABLES.items()
    }
    derivations, texts = 0, set()
    for chosen in itertools.product(*(line[:2] for line in LINES)):
        for found in itertools.product(*free.values()):
            slots = merged(found)
            texts.add(tuple(slots.get(word, word) for template in chosen for word in template))
            derivations += 1
    assert derivations == 2**9 * 2**3
    assert len(texts) == derivations


def merged(found) -> dict:
    return {slot: word for slots in found for slot, word in slots.items()}


def test_no_sentence_fits_two_templates():
    for one, other in itertools.combinations(TEMPLATES, 2):
        assert not could_read_the_same(one, other), (one, other)


def could_read_the_same(one: list[str], other: list[str]) -> bool:
    def words(token):
        variable = VARIABLE_OF.get(token)
        return {slots[token] for slots in VARIABLES[variable]} if variable else {token}

    return len(one) == len(other) and all(
        words(a) & words(b) for a, b in zip(one, other, strict=True)
    )


def test_every_choice_of_a_variable_is_told():
    """Some line tells it in all its templates, so equal texts mean equal choices."""
    full = {
        "people": ["{hero}", "{friend}"],
        "adjective": ["{adjective}"],
        "object": ["{object}"],
        "place": ["{place}"],
        "trouble": ["{lost}"],
        "feeling": ["{feeling}"],
    }
    assert full.keys() == VARIABLES.keys()
    for variable, slots in full.items():
        for slot in slots:
            assert any(all(slot in template for template in line) for line in LINES), slot
        found = [tuple(candidate[slot] for slot in slots) for candidate in VARIABLES[variable]]
        assert len(set(found)) == len(found)


def test_the_reader_pays_what_the_choices_cost():
    """-log p of each story, from its text alone, is that of its derivation: exactly."""
    choices = sum(math.log(len(line)) for line in LINES)
    choices += sum(math.log(len(found)) for found in VARIABLES.values())
    for story in sample(100):
        assert sum(surprisals(story)) == pytest.approx(choices, abs=1e-9)


def test_the_average_surprisal_is_the_entropy_rate():
    told = sample(2000, seed=5)
    assert sum(map(len, told)) / len(told) == pytest.approx(expected_length(), rel=0.005)
    stream = [word for story in told[:300] for word in story]
    mean = sum(surprisals(stream)) / len(stream)
    assert mean == pytest.approx(entropy_per_token(), rel=0.01)


def test_a_reader_expects_probabilities():
    """The probabilities of all next words add up to one, at the start, inside, and when cut."""
    for opening in (None, stories._anywhere()):
        for before in ([], ["He"], ["Then", "Ben"]):
            if opening is None and before:
                continue
            known = sum(surprisals(before, opening))
            total = sum(
                math.exp(known - sum(surprisals([*before, word], opening))) for word in VOCABULARY
            )
            assert total == pytest.approx(1)


def test_a_longer_window_costs_less_and_none_costs_less_than_the_entropy():
    short, middle, long = (entropy_in_window(S, 8_000) for S in (16, 64, 512))
    assert short > middle > long > entropy_per_token()
    # A window loses little once it holds many stories.
    assert long < 1.06 * entropy_per_token()


def test_the_window_is_what_an_exact_count_says():
    """S = 1: one token is seen, the next predicted; counted from a long stream's word pairs."""
    words = [word for story in sample(10_000, seed=9) for word in story]
    pairs, firsts = {}, {}
    for pair in itertools.pairwise(words):
        pairs[pair] = pairs.get(pair, 0) + 1
        firsts[pair[0]] = firsts.get(pair[0], 0) + 1
    n = len(words) - 1
    counted = -sum(k / n * math.log(k / firsts[first]) for (first, _), k in pairs.items())
    assert entropy_in_window(1, 5_000) == pytest.approx(counted, rel=0.02)


# --- The folder -----------------------------------------------------------------------------------


def test_a_folder_of_stories(tmp_path):
    info = write_stories(tmp_path, num_tokens=20_000, seed=3)
    assert info == read_corpus_info(tmp_path)
    assert (info["kind"], info["vocab_size"]) == ("stories", len(VOCABULARY))
    assert (info["train_tokens"], info["val_tokens"]) == (20_000, 1_000)
    assert info["entropy_per_token"] == entropy_per_token()
    assert info["entropy_in_window"]["128"] == pytest.approx(entropy_in_window(128))

    train, val = open_shard(tmp_path / "train_000.bin"), open_shard(tmp_path / "val_000.bin")
    assert (len(train), len(val)) == (20_000, 1_000)
    assert train[:1000].tolist() != val.tolist()
    assert TokenDataset(tmp_path, "train", 128, 0).batch(0, 4).max() < info["vocab_size"]

    text = load_tokenizer(tmp_path).decode(train.tolist(), skip_special_tokens=False)
    assert grammatical_share(text) == (1, 1)


def stories_told(num_tokens: int, seed: int) -> tuple[int, ...]:
    with Progress() as bar:
        return tuple(np.concatenate(list(stories._story_tokens(num_tokens, seed, bar))).tolist())


def test_stories_are_the_same_however_many_are_told_at_once(monkeypatch):
    whole = stories_told(5000, 3)
    monkeypatch.setattr(stories, "TOKENS_AT_ONCE", 700)
    assert stories_told(5000, 3) == whole and len(whole) == 5000


def test_seeds_share_no_stream():
    openings = {stories_told(300, seed) for seed in range(10)}
    assert len(openings) == 10


def test_the_tokenizer_reads_text_as_a_person_types_it():
    tokenizer = stories.story_tokenizer()
    story = sample(1)[0]
    ids = tokenizer.encode(detokenize(story)).ids
    assert [VOCABULARY[index] for index in ids] == story
    assert tokenizer.decode(ids, skip_special_tokens=False) == detokenize(story)
    assert tokenizer.encode("Ben had a zebra.").tokens == ["Ben", "had", "a", "<unknown>", "."]
