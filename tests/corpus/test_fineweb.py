"""Against a loopback server that redirects as the real one does, and misbehaves on demand."""

import hashlib
import http.server
import json
import threading

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from minitron.config import ConfigError
from minitron.corpus.fineweb import download, download_fineweb
from minitron.corpus.folder import load_tokenizer, read_corpus_info, write_corpus_info
from minitron.dataset import TokenDataset, open_shard, write_shard


class Server(http.server.ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {}  # name -> bytes
        self.promised = {}  # name -> sha256, if not that of the file
        self.requests = []  # (name, Range header)
        self.ranges = True
        self.cuts = []  # bytes after which the next connections are cut
        self.errors = []  # status codes of the next answers
        self.url = f"http://127.0.0.1:{self.server_port}/resolve"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server, (_, where, name) = self.server, self.path.split("/", 2)
        if name not in server.files:
            return self.send_error(404)
        if where == "resolve":  # the first answer redirects to storage and carries the checksum
            checksum = server.promised.get(name, hashlib.sha256(server.files[name]).hexdigest())
            self.send_response(302)
            self.send_header("Location", f"/storage/{name}")
            self.send_header("X-Linked-ETag", f'"{checksum}"')
            self.send_header("Content-Length", "0")
            return self.end_headers()

        server.requests.append((name, self.headers.get("Range")))
        if server.errors:
            return self.send_error(server.errors.pop(0))
        self.send_file(server.files[name])

    def send_file(self, data):
        start = 0
        if self.server.ranges and "Range" in self.headers:
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            if start >= len(data):
                return self.send_error(416)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        stop = start + self.server.cuts.pop(0) if self.server.cuts else len(data)
        self.wfile.write(data[start:stop])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path):
    server = Server()
    for index, name in enumerate(
        ("fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin")
    ):
        path = tmp_path / name
        write_shard(path, np.arange(500) + 1000 * index)
        server.files[name] = path.read_bytes()
    server.files["tokenizer.json"] = Tokenizer(models.BPE()).to_str().encode()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def fetch(server, folder, num_shards=2):
    return download_fineweb(
        folder, num_shards, server.url, f"{server.url}/tokenizer.json", wait_s=0.0
    )


NAME = "fineweb_train_000001.bin"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_a_full_download_makes_a_data_folder(server, tmp_path):
    folder = tmp_path / "data"
    info = fetch(server, folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "corpus.json",
        "tokenizer.json",
        "train_001.bin",
        "train_002.bin",
        "val_000.bin",
    ]
    assert info == read_corpus_info(folder)
    assert (info["kind"], info["vocab_size"]) == ("fineweb", 50_257)
    assert load_tokenizer(folder) is not None
    batch = TokenDataset(folder, "train", sequence_length=499).batch(0, 2)
    assert batch[:, 0].tolist() == [1000, 2000]
    assert TokenDataset(folder, "val", sequence_length=499).batch(0, 1)[0, -1] == 499


def test_what_is_complete_is_not_fetched_again(server, tmp_path):
    fetch(server, tmp_path / "data", num_shards=1)
    server.requests.clear()
    fetch(server, tmp_path / "data", num_shards=2)
    assert server.requests == [("fineweb_train_000002.bin", None)]


def test_a_cut_connection_is_resumed_where_it_stopped(server, tmp_path):
    server.cuts = [700, 300]
    download(f"{server.url}/{NAME}", tmp_path / "train_001.bin", wait_s=0.0)
    assert server.requests == [(NAME, None), (NAME, "bytes=700-"), (NAME, "bytes=1000-")]
    assert (tmp_path / "train_001.bin").read_bytes() == server.files[NAME]
    assert not (tmp_path / "train_001.bin.part").exists()


def test_another_call_resumes_what_an_earlier_one_left(server, tmp_path):
    server.cuts = [100, 100, 100, 100]
    with pytest.raises(ConfigError, match=r"cut at byte 400 of 2024 \(4 attempts\)"):
        download(f"{server.url}/{NAME}", tmp_path / "train_001.bin", wait_s=0.0)
    assert (tmp_path / "train_001.bin.part").stat().st_size == 400
    assert not (tmp_path / "train_001.bin").exists()

    server.requests.clear()
    download(f"{server.url}/{NAME}", tmp_path / "train_001.bin", wait_s=0.0)
    assert server.requests == [(NAME, "bytes=400-")]
    assert (tmp_path / "train_001.bin").read_bytes() == server.files[NAME]


def test_a_server_without_ranges_sends_the_file_again(server, tmp_path):
    server.ranges, server.cuts = False, [700]
    download(f"{server.url}/{NAME}", tmp_path / "train_001.bin", wait_s=0.0)
    assert server.requests == [(NAME, None), (NAME, "bytes=700-")]
    assert (tmp_path / "train_001.bin").read_bytes() == server.files[NAME]


def test_a_part_that_is_whole_is_only_verified(server, tmp_path):
    (tmp_path / "train_001.bin.part").write_bytes(server.files[NAME])
    download(f"{server.url}/{NAME}", tmp_path / "train_001.bin", wait_s=0.0)
    assert (tmp_path / "train_001.bin").read_bytes() == server.files[NAME]


def test_corrupt_bytes_are_refused(server, tmp_path):
    server.promised[NAME] = "0" * 64
    with pytest.raises(ConfigError, match=r"sha256 is \w{12}..., but the server promises 0{12}"):
        download(f"{server.url}/{NAME}", tmp_path / "train_001.bin", wait_s=0.0)
    assert not list(tmp_path.glob("train_001*"))


def test_a_corrupt_part_is_fetched_again_from_its_beginning(server, tmp_path):
    (tmp_path / "train_001.bin.part").write_bytes(b"x" * 700)
    download(f"{server.url}/{NAME}", tmp_path / "train_001.bin", wait_s=0.0)
    assert server.requests == [(NAME, "bytes=700-"), (NAME, None)]
    assert (tmp_path / "train_001.bin").read_bytes() == server.files[NAME]


def test_a_file_that_is_no_shard_is_refused_though_its_checksum_is_right(server, tmp_path):
    server.files[NAME] = server.files[NAME][:-2]
    with pytest.raises(ConfigError, match="must end at byte 2024, but it ends at byte 2022"):
        download(f"{server.url}/{NAME}", tmp_path / "train_001.bin", wait_s=0.0)
    assert not list(tmp_path.glob("train_001*"))


def test_a_damaged_shard_that_was_there_is_named_and_left(server, tmp_path):
    path = tmp_path / "train_001.bin"
    path.write_bytes(server.files[NAME][:-2])
    with pytest.raises(ConfigError, match="train_001.bin: byte 8 promises"):
        download(f"{server.url}/{NAME}", path, wait_s=0.0)
    assert path.exists() and server.requests == []


def test_a_busy_server_is_asked_again(server, tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    server.errors = [503, 429, 500]
    download(f"{server.url}/{NAME}", tmp_path / "train_001.bin", wait_s=1.0)
    assert open_shard(tmp_path / "train_001.bin")[0] == 1000
    assert waits == [1, 2, 4]


def test_a_server_that_refuses_is_not_asked_again(server, tmp_path):
    with pytest.raises(ConfigError, match="nothing.bin: the server answers 404"):
        download(f"{server.url}/nothing.bin", tmp_path / "nothing.bin", wait_s=0.0)
    server.errors = [403, 403]
    with pytest.raises(ConfigError, match="answers 403"):
        download(f"{server.url}/{NAME}", tmp_path / "train_001.bin", wait_s=0.0)
    assert server.errors == [403]


def test_without_a_network_there_is_one_clear_line(tmp_path):
    with pytest.raises(ConfigError, match="refused.*4 attempts.*check the network") as caught:
        download("http://127.0.0.1:1/x.bin", tmp_path / "x.bin", wait_s=0.0)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_shards", [0, 104])
def test_a_number_of_shards_that_there_is_not(tmp_path, num_shards):
    with pytest.raises(ConfigError, match=f"num_shards = {num_shards}: .* from 1 to 103"):
        download_fineweb(tmp_path, num_shards)


def test_another_corpus_is_not_mixed_with_it(tmp_path):
    write_corpus_info(tmp_path, "stories", 138)
    with pytest.raises(ConfigError, match="kind stories, not fineweb"):
        download_fineweb(tmp_path, 1)
    assert json.loads((tmp_path / "corpus.json").read_text())["kind"] == "stories"
