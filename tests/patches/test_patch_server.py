"""Stores: objects are whole or not there, names lead nowhere else, and the server lets in who has the token."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import subprocess
import threading
import urllib.error

import pytest
import torch

from gckernels import patches
from gckernels.patches.chain.server import server_of


@contextlib.contextmanager
def served(folder, **settings):
    """The address of a running server."""
    server = server_of(folder, "127.0.0.1", 0, **settings)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        scheme = "https" if "certificate" in settings else "http"
        yield f"{scheme}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def folder(tmp_path):
    return patches.Folder(tmp_path / "store")


@pytest.fixture(params=["folder", "http"])
def store(request, folder):
    if request.param == "folder":
        yield folder
        return
    with served(folder, token="word", writable=True) as url:
        yield patches.Http(url, "word")


def test_the_methods_of_a_store(store):
    assert store.get("a") is None and [*store.names()] == []
    store.put("a", b"1")
    store.put("a", b"22")
    assert store.put_if_absent("b", bytes(3_000_000)) and not store.put_if_absent("b", b"other")
    assert store.get("a") == b"22" and store.get("b") == bytes(3_000_000) and [*store.names()] == ["a", "b"]
    store.put("empty", b"")
    assert store.get("empty") == b""
    store.delete("a")
    store.delete("a")
    assert store.get("a") is None


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".hidden", "/etc/passwd", "a\nb", "a" * 201])
def test_a_name_is_that_of_a_file_in_the_folder(store, name):
    for call in (lambda: store.get(name), lambda: store.put(name, b""), lambda: store.put_if_absent(name, b"")):
        with pytest.raises(ValueError, match="cannot have the name"):
            call()


def test_a_file_of_a_killed_process_is_no_object(folder):
    part = folder.path / ".a.0123.part"
    part.write_bytes(b"half")
    assert folder.names() == [] and folder.get("a") is None
    patches.Folder(folder.path)
    assert part.exists(), "somebody may be writing it"
    os.utime(part, (0, 0))
    patches.Folder(folder.path)
    assert not part.exists()


def test_a_write_that_fails_leaves_nothing(folder, monkeypatch):
    def fails(_):
        raise OSError(28, "No space left on device")

    folder.put("a", b"old")
    monkeypatch.setattr(os, "fsync", fails)
    for put in (folder.put, folder.put_if_absent):
        with pytest.raises(OSError, match="No space"):
            put("a", b"new")
    assert os.listdir(folder.path) == ["a"] and folder.get("a") == b"old"


def test_weights_travel_over_the_server(folder):
    tensors = {"w": torch.randn(3000).bfloat16()}
    replica = {"w": torch.zeros(3000).bfloat16()}
    with served(folder, token="word", writable=True) as url:
        publisher = patches.publish(tensors, patches.Http(url, "word"), anchor_every=2)
        follower = patches.follow(replica, patches.Http(url + "/", "word"))
        for version in range(7):
            follower.apply(follower.fetch())
            assert torch.equal(replica["w"], tensors["w"]) and follower.version == version
            tensors["w"][::50] += 1
            publisher.publish()
    assert min(int(name.split("-")[1].split(".")[0]) for name in folder.names() if name.startswith("patch")) == 4


def test_the_token_is_needed(folder):
    folder.put("a", b"1")
    with served(folder, token="word", writable=True) as url:
        for token in (None, "", "wor", "words"):
            other = patches.Http(url, token)
            for call, *arguments in ((other.get, "a"), (other.names,), (other.put, "a", b""), (other.delete, "a")):
                with pytest.raises(urllib.error.HTTPError, match="401"):
                    call(*arguments)
        assert patches.Http(url, "word").get("a") == b"1"


def test_a_server_is_read_only_unless_it_says_otherwise(folder):
    with served(folder) as url:
        store = patches.Http(url)
        for call in (lambda: store.put("a", b"1"), lambda: store.delete("a"), lambda: store.put_if_absent("a", b"1")):
            with pytest.raises(urllib.error.HTTPError, match="405"):
                call()
    assert folder.names() == []


def test_requests_that_no_client_of_ours_sends(folder):
    folder.put("a", b"1")
    with served(folder, writable=True) as url:
        host = url.removeprefix("http://")
        for method, path, body, headers, code in (
            ("GET", "/../secret", None, {}, 404),
            ("GET", "/%2e%2e/secret", None, {}, 404),
            ("PUT", "/.a", b"1", {}, 404),
            ("PUT", "/", b"1", {}, 400),
            ("PUT", "/b", b"1", {"Content-Length": "-1"}, 400),
            ("DELETE", "/", None, {}, 400),
            ("POST", "/a", b"1", {}, 501),
        ):
            connection = http.client.HTTPConnection(host, timeout=10)
            connection.request(method, path, body, headers)
            assert connection.getresponse().status == code, (method, path)
            connection.close()
        connection = http.client.HTTPConnection(host, timeout=10)
        connection.putrequest("PUT", "/half")
        connection.putheader("Content-Length", "1000")
        connection.endheaders()
        connection.send(b"half of it")
        connection.close()
        assert patches.Http(url).get("half") is None
    assert folder.names() == ["a"]


def test_a_server_that_is_away_is_an_error(monkeypatch):
    monkeypatch.setattr("gckernels.patches.chain.stores._WAIT_S", 0.001)
    with pytest.raises(OSError):
        patches.Http("http://127.0.0.1:9", timeout_s=1).get("a")
    with pytest.raises(ValueError, match="url must begin with http"):
        patches.Http("ftp://somewhere")


def test_tls(folder, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    names = {"-keyout": tmp_path / "key.pem", "-out": tmp_path / "certificate.pem"}
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", *(str(each) for pair in names.items() for each in pair)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    files = {"certificate": str(names["-out"]), "certificate_key": str(names["-keyout"])}
    folder.put("a", b"1")
    with served(folder, token="word", **files) as url:
        assert patches.Http(url, "word", certificates=files["certificate"]).get("a") == b"1"
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            patches.Http(url, "word", timeout_s=5)._asked("a", "GET")
