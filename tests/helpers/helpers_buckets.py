"""A bucket in this process's memory, and a server of S3 on this machine that counts, and fails where it is told to."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from jacstore.storage import buckets

URL = "s3://bucket"
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every bucket is this object store, in memory."""
    store = pytest.importorskip("obstore.store").MemoryStore()
    monkeypatch.setattr(buckets, "connect", lambda bucket: store)
    return store


class Server:
    """moto's server of S3: `share` of all requests fail, half of them after they were carried out; some are slow."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            def log(self, *_: Any) -> None:
                """Say nothing."""

        self.share, self.draw = 0.0, random.Random(0)
        self.requests: Counter[str] = Counter()
        self.failed = 0
        self._lock = threading.Lock()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        with self._lock:
            self.requests[environ["REQUEST_METHOD"]] += 1
            fate = self.draw.random()
            self.failed += fate < self.share
        if fate < self.share / 2:
            start_response("503 Slow Down", [("Content-Length", "0")])
            return []
        if self.share and fate > 1 - self.share:
            time.sleep(0.05)
        if fate < self.share:
            # It is done, but the answer gets lost.
            list(self._app(environ, lambda *_: None))
            start_response("500 Internal Server Error", [("Content-Length", "0")])
            return []
        return self._app(environ, start_response)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture(scope="module")
def a_server() -> Iterator[Server]:
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def server(a_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The server with an empty bucket, where the environment says it is."""
    import boto3

    for name, value in {**KEYS, "AWS_ENDPOINT_URL": a_server.address}.items():
        monkeypatch.setenv(name, value)
    buckets.connect.cache_clear()
    s3 = boto3.resource(
        "s3",
        endpoint_url=a_server.address,
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
    )
    s3.create_bucket(Bucket="bucket")
    a_server.requests.clear()
    a_server.failed = 0
    yield a_server
    a_server.share = 0.0
    s3.Bucket("bucket").objects.all().delete()
    buckets.connect.cache_clear()


def objects(store: Any, folder: str, *below: str) -> dict[str, bytes]:
    """The bytes of all objects below some folders of a place, as `helpers_process.contents` of a folder."""
    import obstore

    found = {}
    for page in obstore.list(store, folder):
        for one in page:
            name = one["path"].removeprefix(folder + "/")
            if name.split("/")[0] in below:
                found[name] = bytes(obstore.get(store, one["path"]).bytes())
    return found
