"""FineWeb, already tokenized by GPT-2's BPE: shards of 100 million tokens, fetched by count.

A download that is cut goes on where it stopped, by an HTTP Range request onto `NAME.part`. A file
gets its final name only after its checksum and its header have been verified, so every `*.bin`
in the folder is whole.
"""

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from pathlib import Path

from minitron.config import ConfigError, require
from minitron.corpus.folder import read_corpus_info, write_corpus_info
from minitron.dataset import open_shard
from minitron.system.progress import Progress

FINEWEB_URL = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main"
TOKENIZER_URL = "https://huggingface.co/openai-community/gpt2/resolve/main/tokenizer.json"
NUM_SHARDS = 103
"""Training shards there are; there is one more to validate."""
GPT2_VOCABULARY = 50_257
ATTEMPTS = 4
CHUNK_BYTES = 1 << 20


class DownloadError(Exception):
    """One attempt has failed; another may succeed."""


def download_fineweb(
    folder: Path,
    num_shards: int,
    url: str = FINEWEB_URL,
    tokenizer_url: str = TOKENIZER_URL,
    wait_s: float = 1.0,
) -> dict:
    """Fetch the validation shard, `num_shards` training shards and GPT-2's tokenizer.

    What is already there is kept, so a second call continues. After a failure it waits `wait_s`
    seconds, then twice as long, and so on. Returns what `corpus.json` says. Raises ConfigError if
    the server cannot be reached or does not send the right bytes.
    """
    require(
        1 <= num_shards <= NUM_SHARDS,
        f"num_shards = {num_shards}: must be from 1 to {NUM_SHARDS}, as many as FineWeb-10B has",
    )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "corpus.json").exists():
        kind = read_corpus_info(folder)["kind"]
        require(
            kind == "fineweb",
            f"{folder} holds a corpus of kind {kind}, not fineweb",
            "choose another folder",
        )

    download(tokenizer_url, folder / "tokenizer.json", wait_s)
    splits = [("val", 0)] + [("train", index) for index in range(1, num_shards + 1)]
    for split, index in splits:
        path = folder / f"{split}_{index:03d}.bin"
        download(f"{url}/fineweb_{split}_{index:06d}.bin", path, wait_s)
    return write_corpus_info(folder, "fineweb", GPT2_VOCABULARY, source=url)


def download(url: str, path: Path, wait_s: float = 1.0) -> None:
    """Fetch one file to `path`, unless it is there; a `.bin` must be a valid shard.

    Raises ConfigError after 4 failed attempts, or at once if the server refuses (HTTP 4xx).
    """
    if path.exists():
        _verify_shard(path)
        return

    part = path.with_name(path.name + ".part")
    for attempt in range(ATTEMPTS):
        if attempt > 0:
            time.sleep(wait_s * 2 ** (attempt - 1))
        try:
            checksum = _fetch(url, part)
            _verify_checksum(part, checksum)
            break
        except (DownloadError, http.client.HTTPException, OSError) as error:
            reason = error
    else:
        raise ConfigError(
            f"{url}: {reason} ({ATTEMPTS} attempts)",
            "check the network and call again: what has arrived is kept",
        )
    _verify_shard(part, named=path)
    os.replace(part, path)


class _RememberChecksum(urllib.request.HTTPRedirectHandler):
    """Follow redirects; keep the checksum that only the first answer carries."""

    checksum = None

    def redirect_request(self, request, file, code, message, headers, new_url):
        self.checksum = self.checksum or _sha256_of(headers)
        return super().redirect_request(request, file, code, message, headers, new_url)


def _sha256_of(headers) -> str | None:
    """Return the LFS sha256 that Hugging Face sends; other ETags are no checksums of content."""
    etag = headers.get("X-Linked-ETag", "").strip('"')
    return etag if len(etag) == 64 else None


def _fetch(url: str, part: Path) -> str | None:
    """Append to `part` what it lacks of the file at `url`; return the sha256 if one is promised."""
    start = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "minitron"})
    if start > 0:
        request.add_header("Range", f"bytes={start}-")

    redirects = _RememberChecksum()
    try:
        response = urllib.request.build_opener(redirects).open(request, timeout=30)
    except urllib.error.HTTPError as error:
        if error.code == 416 and start > 0:  # nothing after `start`: the part is whole
            return redirects.checksum or _sha256_of(error.headers)
        if error.code < 500 and error.code != 429:
            raise ConfigError(f"{url}: the server answers {error.code} {error.reason}") from None
        raise DownloadError(f"the server answers {error.code} {error.reason}") from None

    with response:
        if response.status != 206:  # the server knows no ranges: the file comes from its beginning
            start = 0
        _receive(response, part, start)
        return redirects.checksum or _sha256_of(response.headers)


def _receive(response, part: Path, start: int) -> None:
    expected = int(response.headers.get("Content-Length", 0))  # absent from a chunked answer
    received = 0
    progress = Progress(
        desc=part.stem, initial=start, total=start + expected, unit="B", unit_scale=True
    )
    with open(part, "ab") as file, progress:
        file.truncate(start)
        while chunk := response.read(CHUNK_BYTES):
            file.write(chunk)
            received += len(chunk)
            progress.update(len(chunk))
    if received < expected:
        raise DownloadError(
            f"the connection was cut at byte {start + received} of {start + expected}"
        )


def _verify_checksum(part: Path, expected: str | None) -> None:
    if expected is None:
        return
    with open(part, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        part.unlink()  # from its beginning next time
        raise DownloadError(
            f"sha256 is {found[:12]}..., but the server promises {expected[:12]}..."
        )


def _verify_shard(path: Path, named: Path | None = None) -> None:
    """Raise ConfigError, and remove a part, if what should be a shard is none."""
    if (named or path).suffix != ".bin":
        return
    try:
        open_shard(path)
    except ConfigError:
        if named:
            path.unlink()
        raise
