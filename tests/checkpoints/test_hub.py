"""A hub that means no good, on real servers: where credentials go, and what an answer may cost."""

import json
import resource
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from safetensors.torch import save_file

import keyquery as kq
from keyquery.checkpoints import hub as hub_module

constants = pytest.importorskip("huggingface_hub.constants", reason="needs the extra hf")

TOKEN = "hf_this_is_secret"


class Site(ThreadingHTTPServer):
    """A server whose answers are a function of its handler; it notes who asked for what."""

    daemon_threads = True

    def __init__(self, answer):
        self.answer, self.asked, self.closing = answer, [], threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        pass  # a client that has had enough


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append((self.path, dict(self.headers)))
        self.server.answer(self)

    do_HEAD = do_GET  # noqa: N815

    def reply(self, status, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def site(monkeypatch):
    """Starts servers; the first is the hub."""
    started = []

    def start(answer):
        started.append(Site(answer))
        address = f"http://127.0.0.1:{started[-1].server_port}"
        if len(started) == 1:
            template = address + "/{repo_id}/resolve/{revision}/{filename}"
            monkeypatch.setattr(constants, "ENDPOINT", address)
            monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        return started[-1]

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield start
    for server in started:
        server.closing.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def hurried(monkeypatch):
    for limit, value in {"PATIENCE": 1.0, "SLOWEST": 2**40, "STALL": 1.0}.items():
        monkeypatch.setattr(hub_module, limit, value)


@pytest.fixture
def folder(tmp_path):
    names = [f"model.layers.{layer}.self_attn.{role}_proj.weight" for layer in range(2) for role in "qk"]
    save_file({name: torch.randn(8, 8) for name in names}, tmp_path / "model.safetensors")
    config = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_theta": 10000.0}))
    return tmp_path


def serve(handler, folder):
    """A file, or a range of it."""
    path = folder / handler.path.partition("?")[0].rsplit("/", 1)[-1]
    if not path.is_file():
        return handler.reply(404, X_Error_Code="EntryNotFound", Content_Length="0")
    data, status = path.read_bytes(), 200
    if asked := handler.headers["Range"]:
        first, last = map(int, asked.removeprefix("bytes=").split("-"))
        data, status = data[first : last + 1], 206
    handler.reply(status, Content_Length=str(len(data)), ETag='"e"', X_Repo_Commit="c" * 40)
    return handler.command == "GET" and handler.wfile.write(data)


def test_a_hub_model_is_read_by_byte_ranges(site, folder):
    hub = site(lambda handler: serve(handler, folder))
    heads = kq.read("org/name")
    hub.asked.clear()
    for one, other in zip(heads, kq.read(folder), strict=True):
        assert torch.equal(one.form.query, other.form.query)
        assert torch.equal(one.form.key, other.form.key)
    ranges = [headers["range"].removeprefix("bytes=").split("-") for _, headers in hub.asked]
    assert sum(int(last) - int(first) + 1 for first, last in ranges) == 4 * 8 * 8 * 4
    hub.answer = lambda handler: handler.headers.__delitem__("Range") or serve(handler, folder)
    with pytest.raises(ValueError, match=r"does not serve parts of model\.safetensors"):
        kq.read("org/name")


def test_the_token_goes_to_the_hub_and_does_not_follow_redirects(site, folder):
    """Whether the hub redirects all requests, or those alone that fetch content, to another port or another name."""
    for methods in (("GET", "HEAD"), ("GET",)):
        for host in ("127.0.0.1", "localhost"):
            store = site(lambda handler: serve(handler, folder))

            def redirect(handler, store=store, host=host, methods=methods):
                if handler.command in methods:
                    target = f"http://{host}:{store.server_port}{handler.path}"
                    handler.reply(302, Location=target, Content_Length="0", ETag='"e"', X_Repo_Commit="c" * 40)
                else:
                    serve(handler, folder)

            hub = site(redirect)
            template = f"http://127.0.0.1:{hub.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
                found = kq.read("org/name")
                assert torch.equal(found[1].weights.query, kq.read(folder)[1].weights.query)
            assert all(headers["authorization"] == f"Bearer {TOKEN}" for _, headers in hub.asked)
            assert len(store.asked) > 4
            assert not [headers for _, headers in store.asked if TOKEN in str(headers)]


def test_nothing_but_files_of_the_model_is_asked_for(site, folder, monkeypatch):
    """The library's own headers come with a request of its own for a list of agents, of any size and time."""
    monkeypatch.setattr("huggingface_hub.utils.build_hf_headers", None)
    hub = site(lambda handler: serve(handler, folder))
    kq.read("org/name")[0].weights.query.sum()
    assert {path.rpartition("/")[0] for path, _ in hub.asked} == {"/org/name/resolve/main"}


def test_a_token_that_must_not_be_sent_by_itself_is_not_sent(site, folder, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    hub = site(lambda handler: serve(handler, folder))
    kq.read("org/name")
    assert hub.asked
    assert not [headers for _, headers in hub.asked if TOKEN in str(headers)]


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:application/json,{}"])
def test_a_redirect_to_what_is_no_web_address_is_refused(target, site):
    site(lambda handler: handler.reply(302, Location=target, Content_Length="0"))
    with pytest.raises(ConnectionError, match="org/name could not be had from the hub"):
        kq.read("org/name")


def test_redirects_in_circles_are_refused(site):
    hub = site(lambda handler: handler.reply(302, Location=handler.path, Content_Length="0"))
    with pytest.raises(ConnectionError, match=r"org/name could not be had from the hub: .*redirects"):
        kq.read("org/name")
    assert len(hub.asked) <= 21


def endless(handler, piece=b'"a",' * 2**16, start=b"["):
    handler.reply(200)
    handler.wfile.write(start)
    while handler.command == "GET" and not handler.server.closing.is_set():
        handler.wfile.write(piece)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_an_endless_answer_is_refused_and_takes_little_memory(file, site, folder):
    site(lambda handler: endless(handler) if handler.path.endswith(file) else serve(handler, folder))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=rf"org/name: {file}: more than \d+ bytes came, which is refused"):
        kq.read("org/name")
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2**29


def test_a_range_that_is_longer_than_it_was_asked_for_is_refused(site, folder):
    def answer(handler):
        if handler.headers["Range"]:
            handler.reply(206)
            while not handler.server.closing.is_set():
                handler.wfile.write(b"\1" * 2**16)
        else:
            serve(handler, folder)

    site(answer)
    with pytest.raises(ValueError, match="more than 8 bytes came"):
        kq.read("org/name")


def test_headers_that_are_too_large_together_are_refused(site, folder, monkeypatch):
    """Of a file that says so, and of many shards, each of which is small enough."""
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**27) + b"{}")
    site(lambda handler: serve(handler, folder))
    with pytest.raises(ValueError, match="claims a header of 134217728 bytes; refused"):
        kq.read("org/name")
    monkeypatch.setattr("keyquery.checkpoints.hub.LARGEST", 2**20)
    header = b"{" + b" " * 2**19 + b"}"
    for shard in "abc":
        (folder / shard).write_bytes(struct.pack("<Q", len(header)) + header)
    index = {"weight_map": {shard: shard for shard in "abc"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="claims a header of 524290 bytes; refused"):
        kq.read("org/name")


def drip(handler):
    """A byte now and then, each well within the time that a read may take."""
    handler.reply(200)
    while not handler.server.closing.wait(0.05):
        handler.wfile.write(b" ")
        handler.wfile.flush()


def say_nothing(handler):
    handler.server.closing.wait(60)


@pytest.mark.parametrize("answer", [drip, say_nothing])
@pytest.mark.parametrize("command", ["HEAD", "GET"])
@pytest.mark.few(2)
def test_a_slow_answer_ends_in_time(answer, command, site, folder, hurried):
    site(lambda handler: answer(handler) if handler.command == command or command == "HEAD" else serve(handler, folder))
    start = time.monotonic()
    with pytest.raises(
        ConnectionError, match=r"org/name could not be had from the hub: (no whole response within 1 sec|.*timed out)"
    ):
        kq.read("org/name")
    assert time.monotonic() - start < 10


def test_a_model_that_is_refused_or_without_safetensors_is_one_sentence(site, folder):
    hub = site(lambda handler: handler.reply(401, X_Error_Code="RepoNotFound", Content_Length="0"))
    words = r"org/name could not be had from the hub: config\.json: HTTP status 401 RepoNotFound"
    with pytest.raises(ConnectionError, match=words):
        kq.read("org/name")
    hub.answer = lambda handler: serve(handler, folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"org/name has no model\.safetensors on the hub"):
        kq.read("org/name")


def test_offline_nothing_is_asked(site, folder, monkeypatch):
    hub = site(lambda handler: serve(handler, folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match=r"org/name could not be had from the hub: .*offline mode is enabled"):
        kq.read("org/name")
    assert hub.asked == []
