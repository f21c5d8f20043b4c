"""Passwords of store and collector are used, and no dump, log line, error or bundle has them."""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from npu_gr.core.errors import ConfigError
from npu_gr.core.secret import SecretUrl
from npu_gr.history_store.open import open_store
from npu_gr.history_store.store import HistoryConfig
from npu_gr.server.access_log import spans
from npu_gr.server.config import ServerConfig
from tests.history_store.redis_server import redis_path
from tests.models import events
from tests.server.debug.test_routes import unpacked
from tests.serving import FIRST_ID, columns, serving

PASSWORD = "s3cretOfTheStore"
TOKEN = "s3cretOfTheCollector"
SECRETS = (PASSWORD, TOKEN, base64.b64encode(f"me:{TOKEN}".encode()).decode())


def held_by(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret in text]


@contextmanager
def collector() -> Iterator[tuple[int, list[str]]]:
    """A collector of traces, in a thread.

    Yields its port, and the `Authorization` of what it was sent.
    """
    sent: list[str] = []

    class Collect(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.append(self.headers["Authorization"])
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collect) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port, sent
        finally:
            server.shutdown()
            thread.join()


async def test_neither_password_is_seen_while_both_are_used_and_when_the_store_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    texts = []
    with collector() as (port, sent), ExitStack() as redis:
        path = redis.enter_context(redis_path(tmp_path, "--requirepass", PASSWORD))
        (tmp_path / "url").write_text(f"unix://:{PASSWORD}@{path}\n")
        monkeypatch.setenv("NPU_GR_TEST_COLLECTOR", f"http://me:{TOKEN}@127.0.0.1:{port}/v1/traces")
        async with serving(
            tmp_path,
            watched=False,
            history_store={
                "kind": "redis",
                "url": {"file": str(tmp_path / "url")},
                "timeout_s": 0.5,
                "retry_s": 0.01,
            },
            server={"otlp_endpoint": {"env": "NPU_GR_TEST_COLLECTOR"}, "trace_sample_ratio": 1.0},
        ) as (client, service):
            body = {"user_id": "u", "events": columns(events(3))}
            assert (await client.post("/v1/events", json=body)).status == 200
            redis.close()
            for _ in range(3):
                rejected = await client.post("/v1/events", json=body)
                assert rejected.status == 503
                texts.append(await rejected.text())
            rank = {"user_id": "v", "candidates": [FIRST_ID]}
            texts.append(await (await client.post("/v1/rank", json=rank)).text())
            shown = await (await client.get("/debug/config")).text()
            assert f"unix://***@{path}" in shown
            assert f"http://***@127.0.0.1:{port}/v1/traces" in shown
            files = unpacked(await (await client.get("/debug/bundle")).read())
            routes = ("/debug/status", "/debug/stacks", "/metrics")
            texts += [await (await client.get(route)).text() for route in routes]
            texts += [shown, *files.values(), repr(service.parts.settings.config)]
    assert set(sent) == {f"Basic {SECRETS[2]}"}
    # urllib3's own lines are here, and the driver's would be
    assert "POST /v1/traces" in caplog.text
    assert [held_by(text) for text in (*texts, caplog.text)] == [[]] * (len(texts) + 1)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{PASSWORD}@127.0.0.1:1/0",  # rejected
        f"rediss://me:{PASSWORD}@127.0.0.1:1/0",
        f"redis://:{PASSWORD}@nowhere.invalid:1/0",
        # not encoded: the password ends where a port is looked for
        f"redis://:12{PASSWORD}/x@127.0.0.1:1/0",
        f"redis://:{PASSWORD}#x@127.0.0.1:1/0",
        f"redis://:[{PASSWORD}@127.0.0.1:1/0",
        f"http://me:{PASSWORD}@127.0.0.1:1/0",
        f"redis://127.0.0.1:1/0?password={PASSWORD}",
        f"me:{PASSWORD}@db",
    ],
)
async def test_a_store_that_cannot_be_reached_is_named_without_its_password(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(ConfigError, match=r"history_store\.url: ") as caught:
        await open_store(HistoryConfig(kind="redis", url=SecretUrl(url), timeout_s=0.5))
    chain: BaseException | None = caught.value
    while chain is not None and not (
        chain is not caught.value and caught.value.__suppress_context__
    ):
        assert not held_by(str(chain)), repr(chain)
        chain = chain.__cause__ or chain.__context__
    assert not held_by(caplog.text)


async def test_a_wrong_password_is_an_error_without_it(tmp_path: Path) -> None:
    rejected = pytest.raises(
        ConfigError, match=r"history_store\.url: no answer from unix://\*\*\*@"
    )
    with redis_path(tmp_path, "--requirepass", "another") as path, rejected as caught:
        await open_store(HistoryConfig(kind="redis", url=SecretUrl(f"unix://:{PASSWORD}@{path}")))
    assert not held_by(str(caught.value))


def test_an_endpoint_that_is_no_url_is_an_error_without_it() -> None:
    config = ServerConfig(otlp_endpoint=SecretUrl(f"http://[{TOKEN}/v1/traces"))
    with (
        pytest.raises(
            ConfigError,
            match=r"server\.otlp_endpoint: not "
            r"a URL",
        ) as caught,
        spans(config),
    ):
        pass
    assert not held_by(str(caught.value))
