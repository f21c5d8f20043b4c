"""The models that serve: of each kind the current one, and the one before as long as it drains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from npu_gr.core.errors import NotFound
from npu_gr.core.request import ModelInfo
from npu_gr.jobs.generate import Generation
from npu_gr.jobs.rank import Ranking

J = TypeVar("J", Ranking, Generation)


class Versions:
    """An instance ranks, generates, or both. Event loop only."""

    def __init__(self, ranking: Ranking | None, generation: Generation | None) -> None:
        assert ranking or generation
        self.maybe_ranking, self.maybe_generation = ranking, generation
        self._draining: list[Ranking | Generation] = []
        self._retirements: set[asyncio.Task[None]] = set()
        self.on_change: Callable[[ModelInfo], None] = lambda _first: None

    @property
    def ranking(self) -> Ranking:
        """The current one.

        Raises:
            NotFound: there is none.
        """
        if self.maybe_ranking is None:
            raise NotFound("this instance does not rank: its configuration has no checkpoint")
        return self.maybe_ranking

    @property
    def generation(self) -> Generation:
        """The current one.

        Raises:
            NotFound: there is none.
        """
        if self.maybe_generation is None:
            raise NotFound("this instance does not generate: its configuration has no section generate")
        return self.maybe_generation

    def ranker(self, version: str | None) -> Ranking:
        """The one that a request means.

        Raises:
            NotFound: neither the current version nor one that drains, or there is none.
        """
        draining = [job for job in self._draining if isinstance(job, Ranking)]
        return _of_version([self.ranking, *draining], version)

    def generator(self, version: str | None) -> Generation:
        """As `ranker`."""
        draining = [job for job in self._draining if isinstance(job, Generation)]
        return _of_version([self.generation, *draining], version)

    def current(self) -> list[Ranking | Generation]:
        """What the instance does."""
        return [job for job in (self.maybe_ranking, self.maybe_generation) if job is not None]

    def all(self) -> list[Ranking | Generation]:
        """Those that drain first: the pages, which they share, are the current ones' to overwrite."""
        return [*self._draining, *self.current()]

    def models(self) -> list[ModelInfo]:
        """Of all, the current ones first."""
        draining = [replace(job.model, is_draining=True) for job in self._draining]
        return [job.model for job in self.current()] + draining

    @property
    def is_draining(self) -> bool:
        """Whether a replaced version is still there."""
        return bool(self._draining)

    def replace_ranking(self, new: Ranking) -> None:
        """Rank with `new` from now on; the old version drains: requests that name it get it for `t_life_s`."""
        old, self.maybe_ranking = self.ranking, new
        self._drain(old)

    def replace_generation(self, new: Generation) -> None:
        """Generate with `new` from now on; as `replace_ranking`."""
        old, self.maybe_generation = self.generation, new
        self._drain(old)

    def _drain(self, old: Ranking | Generation) -> None:
        self._draining.append(old)
        self.on_change(self.models()[0])
        task = asyncio.get_running_loop().create_task(self._retire(old))
        self._retirements.add(task)
        task.add_done_callback(self._retirements.discard)

    async def _retire(self, old: Ranking | Generation) -> None:
        await asyncio.sleep(old.relay.t_life_s)
        await old.use.over()  # no request is let in between this and the next line
        self._draining.remove(old)
        await old.stop()

    async def stop(self) -> None:
        """End what runs in the background, of every version."""
        for task in list(self._retirements):
            task.cancel()
        await asyncio.gather(*self._retirements, return_exceptions=True)
        for job in self.all():
            await job.stop()


def _of_version(served: Sequence[J], version: str | None) -> J:
    """The first, or the one that is named."""
    for job in served:
        if version in (None, job.version):
            return job
    names = " and ".join(repr(job.version) for job in served)
    raise NotFound(f"model_version: {version!r} is not served; {names} {'is' if len(served) == 1 else 'are'}")
