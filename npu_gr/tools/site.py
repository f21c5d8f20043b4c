"""A site in Python: train it, ask it, serve it.

    site = npu_gr.train("events.csv", items="items.csv")
    site.recommend("u1")
    site.serve()

It is the same as `npu-gr prepare`, `train all` and `serve`: the models are trained in processes of
their own, so a script needs no `if __name__ == "__main__"` and a notebook's event loop does not
matter, and recommendations come over HTTP from an instance in a process of its own.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console

from npu_gr.client import Client
from npu_gr.core.errors import ConfigError, DataError, Unavailable
from npu_gr.dataset.build import PreparedDataset, prepare
from npu_gr.dataset.files import read_dataset
from npu_gr.dataset.options import PrepareOptions
from npu_gr.dataset.summary import summary
from npu_gr.tools.demo_instance import START_TIMEOUT_S, free_port
from npu_gr.train.site.configuration import SERVE
from npu_gr.train.site.folder import SiteFolder, asked_at
from npu_gr.train.site.report import SiteReport

if TYPE_CHECKING:
    from npu_gr.dataset.sources import ArrowStream

STOP_TIMEOUT_S = 30.0
LOG = "service.log"
_FORCING = ("FORCE_COLOR", "CLICOLOR_FORCE")


def train(
    log: Path | str | ArrowStream,
    *,
    items: Path | str | ArrowStream | None = None,
    users: Path | str | ArrowStream | None = None,
    out: Path | str = "site",
    preset: str = "full",
    options: PrepareOptions | None = None,
    overrides: Sequence[str] = (),
    threads: int = 2,
) -> Site:
    """Prepare a log, train every model of it, and load the log into the history store.

    The same call goes on after an interruption, and reuses what is finished.

    Args:
        log: A file, folder or pattern, or a frame of pandas, polars or pyarrow: what `npu-gr
            prepare` reads.
        items: A file or frame with titles and features of items.
        users: A file or frame with features of users.
        out: Folder of the site; the dataset is in its subfolder `data`.
        preset: "full", or "quick" for a first look.
        options: Settings of `prepare` that are otherwise guessed from the log.
        overrides: `section.key=value` of training options, as `npu-gr train all --set` takes them.
        threads: Threads of all trainings together.

    Raises:
        DataError: the log cannot be read or trained on; an earlier site stays as it was.
    """
    folder = Path(out).resolve()  # the paths of the configuration then hold in every folder
    prepared: PreparedDataset = prepare(log, folder / "data", options, items=items, users=users)
    _say(summary(prepared.manifest, folder / "data"))
    settings = [word for one in overrides for word in ("--set", one)]
    words = ["train", "all", str(folder / "data"), "--out", str(folder), "--preset", preset]
    _run([*words, *settings, "--threads", str(threads)])
    return Site(folder)


class Site:
    """A trained site: the folder that `npu_gr.train` or `npu-gr train all` made.

    The first recommendation starts an instance in the background. It ends with the block, with
    `close()`, or with the process.
    """

    def __init__(self, folder: Path | str = "site") -> None:
        """Open a site; nothing starts yet.

        Raises:
            DataError: there is no site.
        """
        self.folder = Path(folder).resolve()
        if not (self.folder / SERVE).is_file():
            raise DataError(f"{self.folder}: no site; npu_gr.train(log, out=...) makes one")
        self._client: Client | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: Callable[[], object] = lambda: None

    @cached_property
    def report(self) -> SiteReport:
        """How good the models are."""
        found = SiteFolder(self.folder).report()
        if found is None:
            raise DataError(f"{self.folder}: the report cannot be read")
        return found

    @property
    def verdict(self) -> str:
        """Whether the site is better than the strongest baseline, in one line."""
        return self.report.verdict.text if self.report.verdict else "Verdict: none."

    def recommend(self, user: str | int, num_items: int = 10, **more: Any) -> list[dict[str, Any]]:
        """Recommend items, best first; an unknown user gets popular ones.

        Args:
            user: Name of the user in the log.
            num_items: Largest number of items.
            more: Further arguments of `npu_gr.client.Client.recommend`, such as `history`,
                `deny_items` and `exclude_seen`.

        Returns:
            For each item its name, title (None = it has none) and score (None = not ranked).
        """
        if self._client is None or self._process is None or self._process.poll() is not None:
            self.start(free_port(), free_port())
        assert self._client is not None
        # a log that ended long ago is asked as of its end
        more = {"fields": ["title"], "timestamp": self._asked_at, **more}
        return [
            {
                "item": item.name,
                "title": item.title,
                "score": item.score if item.score == item.score else None,
            }
            for item in self._client.recommend(user, num_items=num_items, **more)
        ]

    @cached_property
    def _asked_at(self) -> int | None:
        return asked_at(read_dataset(Path(self.report.dataset)).interactions())

    def start(self, port: int = 8080, admin_port: int = 8081) -> str:
        """Start an instance in the background, and return its URL; an earlier one is stopped.

        Raises:
            Unavailable: it did not start; the message names its log.
        """
        self.close()
        ports = [f"server.port={port}", f"server.admin_port={admin_port}"]
        command = [sys.executable, "-m", "npu_gr", "serve", "--config", str(self.folder / SERVE)]
        command += [word for one in ports for word in ("--set", one)]
        with (self.folder / LOG).open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603  our own
        self._process = process
        # it also ends at garbage collection and at the exit of this process
        self._stop = weakref.finalize(self, _stop, process)
        url = f"http://127.0.0.1:{port}"
        ends_at = time.monotonic() + START_TIMEOUT_S
        while not _is_ready(port):
            if process.poll() is not None or time.monotonic() > ends_at:
                self.close()
                raise Unavailable(f"the service did not start; its log: {self.folder / LOG}")
            time.sleep(0.05)
        self._client = Client(url)
        return url

    def serve(self, port: int = 8080, admin_port: int = 8081) -> None:
        """Serve at 127.0.0.1 until Ctrl-C. `npu-gr serve` does the same, for production.

        Raises:
            Unavailable: the service did not start, or ended by itself.
        """
        url = self.start(port, admin_port)
        _say(f"serving {url}/v1/recommend, status page http://127.0.0.1:{admin_port}/")
        assert self._process is not None
        try:
            code = self._process.wait()
        except KeyboardInterrupt:
            return
        finally:
            self.close()
        raise Unavailable(f"the service ended with code {code}; its log: {self.folder / LOG}")

    def close(self) -> None:
        """Stop the instance, if one runs."""
        if self._client is not None:
            self._client.close()
            self._client = None
        self._stop()
        self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _say(text: str) -> None:
    Console(force_jupyter=False).print(text, soft_wrap=True, markup=False, highlight=False)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (http.client.HTTPException, OSError):
        return False
    finally:
        connection.close()


def _run(words: Sequence[str]) -> None:
    """Run a command of npu-gr; what it prints is printed here, also in a notebook.

    Raises:
        ConfigError: it failed; the message is its last line.
    """
    command = [sys.executable, "-m", "npu_gr", *words]
    if sys.stdout.isatty():
        code, last = subprocess.call(command), "see above"  # noqa: S603  our own
    else:
        last = ""
        # a notebook sets these, and then a pipe gets every frame of every bar
        env = {name: text for name, text in os.environ.items() if name not in _FORCING}
        with subprocess.Popen(  # noqa: S603  our own
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    _say(line.rstrip("\n"))
                    last = line.strip() or last
            except BaseException:  # Ctrl-C in a notebook, which only this process gets
                process.terminate()
                raise
        code = process.returncode
    if code:
        raise ConfigError(f"npu-gr {words[0]} ended with code {code}: {last}")
