import numpy as np
import pytest
from tokenizers import AddedToken

from minitron.config import ConfigError
from minitron.corpus.folder import END, load_tokenizer, read_corpus_info
from minitron.corpus.text import train_tokenizer, write_documents, write_python, write_text
from minitron.dataset import open_shard

WORDS = "the quick brown fox jumps over the lazy dog and the dog sleeps"


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for index in range(20):
        place = folder / "deep" if index % 2 else folder
        (place / f"{index:02d}.txt").write_text(f"file {index}: {WORDS}\n" * 5)
    (folder / "notes.md").write_text("# not asked for\n")
    return folder


def tokens_of(folder, split) -> list[int]:
    return np.concatenate([open_shard(p) for p in sorted(folder.glob(f"{split}_*.bin"))]).tolist()


def text_of(folder, split) -> str:
    return load_tokenizer(folder).decode(tokens_of(folder, split), skip_special_tokens=False)


# --- The tokenizer --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [WORDS, " leading  and trailing \n\n", "tab\there\r\n", "naïve café", "日本語", "🙂", ""],
)
def test_any_text_reads_back_also_bytes_never_seen(text):
    tokenizer = train_tokenizer([WORDS], 300)
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_merges_make_text_shorter_and_end_is_one_token():
    tokenizer = train_tokenizer([WORDS] * 5, 300)
    assert len(tokenizer.encode(WORDS).ids) < len(WORDS) / 2
    assert len(train_tokenizer([WORDS], 257).encode(WORDS).ids) == len(WORDS)
    assert tokenizer.token_to_id(END) == 0
    assert tokenizer.get_vocab_size() <= 300


@pytest.mark.parametrize("text", ["a" * 20_000, "ab" * 10_000, " " * 20_000, "é" * 10_000])
def test_a_word_without_end_is_learned_in_pieces(text):
    """To learn it whole takes time that grows with the square of its length."""
    tokenizer = train_tokenizer([text], 4096)
    assert max(map(len, tokenizer.get_vocab())) <= 1000, "learned whole"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text and len(ids) < 100


def test_long_words_change_nothing_for_others():
    from minitron.corpus import text

    tokenizer = train_tokenizer([WORDS] * 5, 4096)
    cut = train_tokenizer([WORDS] * 5 + ["\n" * text.LONGEST_WORD], 4096)
    assert cut.to_str().split('"model"')[0] == tokenizer.to_str().split('"model"')[0]
    assert cut.encode(WORDS).tokens == tokenizer.encode(WORDS).tokens


@pytest.mark.parametrize("special", [AddedToken("<|user|>"), AddedToken("<pad>", lstrip=True)])
def test_no_special_token_of_any_tokenizer_is_read_in_a_text(tmp_path, special):
    """Those of a tokenizer that comes from elsewhere are ordinary text too, once it is loaded."""
    made = train_tokenizer([WORDS], 300)
    made.add_special_tokens([special])
    made.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    text = f"a {special.content} b{END}{special.content}"
    for tokenizer in (made, loaded):
        ids = tokenizer.encode(text).ids
        assert {0, tokenizer.token_to_id(special.content)}.isdisjoint(ids)
        assert tokenizer.decode(ids) == text


# --- Files ----------------------------------------------------------------------------------------


def test_every_file_is_in_exactly_one_split(texts, tmp_path):
    info = write_text([texts], tmp_path / "data", vocab_size=300, val_share=0.1)
    assert info == read_corpus_info(tmp_path / "data")
    assert info["kind"] == "text" and 257 < info["vocab_size"] <= 300
    assert info["documents"] == 20

    train = text_of(tmp_path / "data", "train").split(END)
    val = text_of(tmp_path / "data", "val").split(END)
    assert train.pop() == val.pop() == ""  # <end> stands after each, the last one too
    assert (len(train), len(val)) == (18, 2)
    originals = [path.read_text() for path in texts.rglob("*.txt")]
    assert sorted(train + val) == sorted(originals)
    assert info["characters"] == sum(map(len, originals))
    assert info["train_tokens"] == len(tokens_of(tmp_path / "data", "train"))
    assert info["val_tokens"] == len(tokens_of(tmp_path / "data", "val"))


def test_a_second_time_gives_the_same_bytes_and_no_stale_shards(texts, tmp_path):
    write_text([texts], tmp_path / "a", vocab_size=300, shard_tokens=100)
    assert len(list((tmp_path / "a").glob("train_*.bin"))) > 2
    write_text([texts], tmp_path / "a", vocab_size=300)
    write_text([texts], tmp_path / "b", vocab_size=300)
    for name in sorted(path.name for path in (tmp_path / "a").iterdir()):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert len(list((tmp_path / "a").iterdir())) == 4


def test_a_single_file_is_cut_in_two(tmp_path):
    path = tmp_path / "one.log"
    path.write_text(WORDS * 20)
    write_text([path], tmp_path / "data", vocab_size=300, val_share=0.25)
    train, val = text_of(tmp_path / "data", "train"), text_of(tmp_path / "data", "val")
    assert train.removesuffix(END) + val.removesuffix(END) == WORDS * 20
    assert len(val.removesuffix(END)) == len(WORDS) * 5


@pytest.mark.parametrize("lengths", [(40, 40), (1, 400), (400, 1), (*[3] * 19, 900), (900, 2, 2)])
def test_about_the_share_that_is_asked_for_validates(tmp_path, lengths):
    """However few the files are, and however unequal: not 95 % of the text, nor nothing."""
    for index, length in enumerate(lengths):
        (tmp_path / f"{index:03d}.txt").write_text(f"{index:03d} {WORDS}\n" * length)
    write_text([tmp_path], tmp_path / "data", vocab_size=300)
    train, val = text_of(tmp_path / "data", "train"), text_of(tmp_path / "data", "val")
    characters = sum(path.stat().st_size for path in tmp_path.glob("*.txt"))
    parts = [part for text in (train, val) for part in text.split(END)]
    assert sum(map(len, parts)) == characters
    assert 0.025 <= len(val.replace(END, "")) / characters <= 0.1


def test_of_two_files_the_ends_validate(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name[0] * 20)
    write_text([tmp_path], tmp_path / "data", vocab_size=300)
    assert text_of(tmp_path / "data", "train") == "a" * 19 + END + "b" * 19 + END
    assert text_of(tmp_path / "data", "val") == "a" + END + "b" + END


def documents_of(folder, split) -> list[str]:
    """The documents of a split, cut at the tokens that end them."""
    tokenizer, documents, document = load_tokenizer(folder), [], []
    for token in tokens_of(folder, split):
        if token == tokenizer.token_to_id(END):
            documents.append(tokenizer.decode(document))
            document = []
        else:
            document.append(token)
    assert not document
    return documents


def test_the_name_of_the_end_does_not_end_a_document(tmp_path):
    texts = [f"file {index}: {WORDS}\n" for index in range(40)]
    texts[7] = f"{END} closes a text, and {END} is its name"
    for index, text in enumerate(texts):
        (tmp_path / f"{index:02d}.txt").write_text(text)
    info = write_text([tmp_path], tmp_path / "data", vocab_size=300)
    assert info["documents"] == 40
    written = [documents_of(tmp_path / "data", split) for split in ("train", "val")]
    assert sorted(sum(written, [])) == sorted(texts)


@pytest.mark.parametrize("place", ["a.txt", "deep/b.txt"])
def test_a_file_is_read_once_wherever_it_is_named(tmp_path, monkeypatch, place):
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    for name in ("a.txt", "deep/b.txt", "c.txt"):
        (tmp_path / "texts" / name).write_text(f"{name}: {WORDS}\n")
    (tmp_path / "link.txt").symlink_to(tmp_path / "texts" / place)
    (tmp_path / "linked").symlink_to(tmp_path / "texts")
    monkeypatch.chdir(tmp_path)
    paths = [
        "texts",
        f"texts/{place}",
        f"texts/deep/../{place}",
        "texts/deep",
        tmp_path / "texts",
        "link.txt",
        f"linked/{place}",
    ]
    write_text(["texts"], tmp_path / "once", vocab_size=300)
    for number, several in enumerate((paths, [*paths[:1], *paths])):
        info = write_text(several, tmp_path / f"{number}", vocab_size=300)
        assert info == read_corpus_info(tmp_path / "once") and info["documents"] == 3
        for split in ("train", "val"):
            assert tokens_of(tmp_path / f"{number}", split) == tokens_of(tmp_path / "once", split)


def test_the_pattern_chooses(texts, tmp_path):
    write_text([texts], tmp_path / "data", vocab_size=300, pattern="*.md", val_share=0.5)
    assert text_of(tmp_path / "data", "train").startswith("# not")


# --- What a user can get wrong --------------------------------------------------------------------


def test_a_missing_path(tmp_path):
    with pytest.raises(ConfigError, match="nowhere: there is no such file or directory"):
        write_text([tmp_path / "nowhere"], tmp_path / "data")


def test_no_file_matches(texts, tmp_path):
    with pytest.raises(ConfigError, match=r"texts: no file matches \*.rst in it or below"):
        write_text([texts], tmp_path / "data", pattern="*.rst")


@pytest.mark.parametrize("pattern", ["/etc/*", "**x", "", "a/**b"])
def test_a_pattern_that_is_none(texts, tmp_path, pattern):
    with pytest.raises(ConfigError, match="--pattern .*: .*; use one such as|no file matches"):
        write_text([texts], tmp_path / "data", pattern=pattern)


def test_more_text_than_memory_holds(texts, tmp_path, monkeypatch):
    monkeypatch.setattr("minitron.corpus.text.memory_bytes", lambda device: 1000)
    with pytest.raises(ConfigError, match="but this machine has .* split it into smaller files"):
        write_text([texts], tmp_path / "data")


def test_only_empty_files(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ConfigError, match="1 files, all empty"):
        write_text([tmp_path], tmp_path / "data")


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="mem: cannot be read .*; leave it out"):
        write_text(["/proc/self/mem"], tmp_path / "data")


def test_a_file_that_is_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 noir")
    with pytest.raises(ConfigError, match="a.txt: byte 3 is not UTF-8"):
        write_text([tmp_path], tmp_path / "data")


@pytest.mark.parametrize("vocab_size", [256, 65_536])
def test_a_vocabulary_that_cannot_be(texts, tmp_path, vocab_size):
    (texts / "bad.txt").write_bytes(b"\xff")  # is not read before
    with pytest.raises(ConfigError, match=f"vocab_size = {vocab_size}: must be from 257 .* 65535"):
        write_text([texts], tmp_path / "data", vocab_size=vocab_size)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("val_share", [0.0, 1.0])
def test_a_share_that_leaves_a_split_empty(val_share, tmp_path):
    with pytest.raises(ConfigError, match=f"val_share = {val_share}: must be between 0 and 1"):
        write_documents([WORDS], tmp_path, "text", 300, val_share)


def test_one_character_cannot_be_split(tmp_path):
    with pytest.raises(ConfigError, match="1 characters are too few"):
        write_documents(["x"], tmp_path, "text", 300, 0.1)


# --- The standard library -------------------------------------------------------------------------


def test_python_sources_without_tests_up_to_a_size(tmp_path):
    library = tmp_path / "lib"
    for name in ("a.py", "b/c.py", "b/test/d.py", "site-packages/e.py", "z.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f"# {name}\n" * 10)
    (library / "empty.py").write_text("")
    # 70 + 90 bytes of a.py and b/c.py: z.py no longer fits, and what is left out does not count.
    write_python(tmp_path / "data", vocab_size=300, val_share=0.5, max_bytes=170, library=library)
    written = text_of(tmp_path / "data", "train") + text_of(tmp_path / "data", "val")
    assert written == "# a.py\n" * 10 + END + "# b/c.py\n" * 10 + END


def test_the_running_python_has_sources(tmp_path):
    info = write_python(tmp_path / "data", vocab_size=400, max_bytes=150_000)
    assert info["kind"] == "python"
    assert 50_000 < info["characters"] <= 150_000
    assert "import" in text_of(tmp_path / "data", "train")


def test_a_python_without_sources(tmp_path):
    with pytest.raises(ConfigError, match="came without its sources"):
        write_python(tmp_path / "data", library=tmp_path)
