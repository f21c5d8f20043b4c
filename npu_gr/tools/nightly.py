"""`npu-gr nightly`: add new days to a site, train it again, and serve the result if no worse.

    add       the new files to the dataset (`npu-gr prepare --add-to`); events that it has are not
              added again, so a repeated run changes nothing
    train     the models on, in fewer epochs, with the options of the site (`npu-gr train all`);
              actions, tasks, features and codes keep their meaning
    compare   the evaluated models of the site with the new ones, over HTTP, by each user's last
              event in the new dataset, which neither has seen
    keep      the models in service as a version, then move the new ones into place
    reload    the running instance, and load the new events into its history store

Killed at any moment, the site in service stays whole, and the same command goes on: see
`npu_gr/train/site/folder.py`. One run at a time, by a lock.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import aiohttp
from rich.console import Console

from npu_gr.core.calling import calling_context, calling_headers
from npu_gr.core.errors import ConfigError, DataError, Unavailable
from npu_gr.dataset.build import add
from npu_gr.server.config import ServerConfig
from npu_gr.tools.served_quality import served_ranks
from npu_gr.train.cascade import TOP, next_events
from npu_gr.train.data import to_train_on
from npu_gr.train.metrics import Difference, difference_of_users, hit_ratio, ndcg_of_each
from npu_gr.train.site.configuration import EVALUATED_CONFIG, SERVE
from npu_gr.train.site.folder import REPORT, SiteFolder, digest
from npu_gr.train.site.like import OldSite
from npu_gr.train.site.make import POPULAR, README, TrainedSite, train_site
from npu_gr.train.site.parts import PARTS
from npu_gr.train.site.report import SiteReport

VERSIONS = "versions"
KEPT = 3  # versions before the one in service
FILES = (*PARTS, POPULAR, SERVE, EVALUATED_CONFIG, README, REPORT)
RUN_LOCK = ".nightly"
COMPARED_USERS = 600  # as many as choose and evaluate a cascade
RELOADS = ("/v1/models/reload", "/v1/catalog/reload", "/v1/match/reload")
RELOAD_TIMEOUT_S = 300.0
BUSY = (409, 503)  # the version before still finishes its requests: worth another try
RETRY_S = 2.0


class Worse(DataError):
    """The new models are worse than those in service, which stay."""


def nightly(
    site: Path,
    logs: Sequence[str],
    num_threads: int,
    console: Console,
    *,
    force: bool = False,
    anew: bool = False,
    tensorboard: Path | None = None,
) -> SiteReport:
    """Add new logs to a site's dataset, train its models again, and put them in place.

    Args:
        site: Folder of the site.
        logs: Files, folders or patterns of new days; empty = the dataset has been extended.
        num_threads: Threads of all trainings together.
        console: Terminal for progress and figures.
        force: Put the new models in place even if they are worse.
        anew: Train from random weights, not on from the models in service.
        tensorboard: Folder for TensorBoard, which gets the curves of the trainings.

    Raises:
        Worse: the new models are significantly worse; the site stays, the dataset is extended.
        ConfigError: another run has the lock, or the site cannot be served.
        DataError: a log or the dataset cannot be read; nothing changed.
    """
    with _one_at_a_time(site):
        served = OldSite.read(site).report
        for log in logs:
            found = add(log, served.dataset).manifest
            console.print(f"{log}: added, the dataset has {found['events']:,} events")

        def accept(candidate: TrainedSite) -> None:
            if not candidate.is_new:
                console.print("no model has changed")
                return
            gap, text = compared(candidate)
            console.print(text, soft_wrap=True, markup=False, highlight=False)
            if gap is not None and gap.high < 0 and not force:
                raise Worse(f"{site}: the new models are worse, so the site stays as it was")
            keep(candidate.site)

        data = Path(served.dataset)
        chosen = (served.overrides, num_threads, console, served.preset)
        made = _as_made(site, served)
        return train_site(
            data,
            made,
            *chosen,
            served_ranks,
            accept,
            like=site,
            trains_on=not anew,
            tensorboard=tensorboard,
        )


def compared(candidate: TrainedSite) -> tuple[Difference | None, str]:
    """Compare new models with those in service, each by its evaluated ones, on the same users.

    Returns:
        NDCG@10 of the new ones minus that of the old ones, None = no user can be compared; and the
        comparison in words.

    Raises:
        Unavailable: a service did not start, or a request failed.
    """
    log = candidate.log
    known = to_train_on(log.users, log.timestamps, "leave-one-out")
    cases = next_events(log, known, COMPARED_USERS)
    if not cases:
        return None, "no user has two events, so the new models are not compared"
    old = served_ranks(candidate.site / EVALUATED_CONFIG, [], cases)
    new = served_ranks(candidate.config, candidate.overrides, cases)
    gap = difference_of_users(ndcg_of_each(new, TOP), ndcg_of_each(old, TOP))
    what = (
        "better than"
        if gap.low > 0
        else "worse than"
        if gap.high < 0
        else "not shown to differ from"
    )
    return gap, (
        f"the new models are {what} those in service: HR@{TOP} {hit_ratio(new, TOP):.3f} against "
        f"{hit_ratio(old, TOP):.3f}, NDCG@{TOP} {gap.mean:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}] "
        f"(95 %, paired, {len(cases):,} users)"
    )


def keep(site: Path) -> Path:
    """Keep the models in service as a version, and delete the oldest beyond `KEPT`.

    Files are linked, not copied, so a version costs no disk until the site changes.
    """
    stamp = OldSite.read(site).report.made_at[:19].replace(":", "")
    place = site / VERSIONS / stamp
    if not place.exists():
        unfinished = site / VERSIONS / ".unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _link(site, unfinished)
        os.rename(unfinished, place)
    for old in versions(site)[KEPT:]:
        shutil.rmtree(old)
    return place


def versions(site: Path) -> list[Path]:
    """List the kept versions, newest first."""
    return sorted((site / VERSIONS).glob("[0-9]*"), reverse=True)


def restore(site: Path) -> Path:
    """Put the newest kept version back in place; the models in service are dropped.

    A `serve.yaml` that an operator has changed stays.

    Raises:
        ConfigError: no version is kept, or another run has the lock.
    """
    with _one_at_a_time(site), SiteFolder.opened(site) as folder:
        kept = versions(site)
        if not kept:
            raise ConfigError(f"{site / VERSIONS}: no version is kept")
        for name in PARTS:
            folder.discard(name)
        written = OldSite.read(site).report.written.get(SERVE)
        is_changed = digest((site / SERVE).read_text()) != written
        _link(kept[0], folder.staged)
        folder.put_in_place([name for name in FILES if name != SERVE or not is_changed])
        shutil.rmtree(kept[0])
        return kept[0]


async def reload(server: ServerConfig, api_key: str | None, console: Console) -> bool:
    """Let a running instance serve the files in place; False = no instance runs.

    Raises:
        Unavailable: it rejected them; the message is its own.
    """
    scheme = "http" if server.tls is None else "https"
    base = f"{scheme}://{server.admin_host}:{server.admin_port}"
    async with aiohttp.ClientSession(
        headers=calling_headers(api_key),
        connector=aiohttp.TCPConnector(ssl=calling_context()),
        timeout=aiohttp.ClientTimeout(total=RELOAD_TIMEOUT_S),
    ) as http:
        for path in RELOADS:
            ends_at = time.monotonic() + RELOAD_TIMEOUT_S
            try:
                while True:
                    async with http.post(base + path) as answer:
                        status, text = answer.status, await answer.text()
                    if status not in BUSY or time.monotonic() > ends_at:
                        break
                    await asyncio.sleep(RETRY_S)
            except aiohttp.ClientConnectorError:
                console.print(f"no instance runs at {base}; its next start serves the new models")
                return False
            except (aiohttp.ClientError, TimeoutError) as error:
                raise Unavailable(f"{base}{path}: {error!r}") from error
            if status == 404 and path != RELOADS[0]:
                continue  # this site has no generator, or no vectors
            if status != 200:
                raise Unavailable(f"{base}{path} answered {status}: {text}")
    console.print(f"{base} serves the new models")
    return True


def _as_made(site: Path, report: SiteReport) -> Path:
    """Name the site as the command that made it did.

    The paths of `serve.yaml` begin with it, and a running instance rejects another path of its
    history store.
    """
    words = shlex.split(report.made_by)
    if "--out" in words[:-1]:
        made = Path(words[words.index("--out") + 1])
        if made.exists() and made.samefile(site):
            return made
    return site


def _link(source: Path, target: Path) -> None:
    """Link the files of models, and copy those that are edited in place."""
    for name in FILES:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, copy_function=os.link)
        elif (source / name).exists():
            shutil.copy2(source / name, target / name)


@contextmanager
def _one_at_a_time(site: Path) -> Iterator[None]:
    """Hold the lock of a run.

    Raises:
        ConfigError: another run has it, or there is no such folder.
    """
    try:
        lock = os.open(site / RUN_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"{site}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ConfigError(f"{site}: another nightly run works on it") from error
    finally:
        os.close(lock)
