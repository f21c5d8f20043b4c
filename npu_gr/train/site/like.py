"""What a new site keeps of an earlier one, so that an instance of the one can reload the other.

actions     keep their numbers, and items their ids; the dataset decides that, and it is checked
tasks       of the ranker, with their meaning
features    of the ranker: names, kinds and values
codes       the levels of semantic IDs, and their number as long as there is room
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import NamedTuple

import msgspec

from npu_gr.catalogue.names import ItemNames
from npu_gr.core.errors import ConfigError
from npu_gr.core.names import difference
from npu_gr.dataset.files import Dataset
from npu_gr.model.weights import config_of
from npu_gr.train.site.configuration import CODE_COUNTS, ROOM, SiteOptions
from npu_gr.train.site.folder import SiteFolder
from npu_gr.train.site.report import SiteReport


class OldSite(NamedTuple):
    """An earlier site."""

    place: Path
    report: SiteReport

    @classmethod
    def read(cls, place: Path) -> OldSite:
        """Read the report of a site.

        Raises:
            ConfigError: there is no site.
        """
        report = SiteFolder(place).report()
        if report is None:
            raise ConfigError(f"{place}: no site of `npu-gr train all`")
        return cls(place, report)


def options_like(
    old: OldSite, dataset: Dataset, options: SiteOptions, *, is_code_count_set: bool
) -> SiteOptions:
    """Keep the tasks, the features and the codes of an earlier site; options that are set count.

    Args:
        old: The earlier site.
        dataset: Dataset of the new site.
        options: Options of the new site.
        is_code_count_set: Whether its number of codes was set, not chosen by the catalogue's size.

    Raises:
        ConfigError: the dataset has other actions or another key of item ids.
        CheckpointError: the earlier ranker cannot be read.
    """
    before = config_of(old.place / "ranker")
    again = f"prepare the log with --like {old.report.dataset}"
    if changed := difference(before.actions, dataset.action_names):
        raise ConfigError(f"--like {old.place}: the dataset has other actions: {changed}; {again}")
    names = ItemNames.load(old.place / "ranker")
    if names is not None and names.key != dataset.item_key:
        raise ConfigError(f"--like {old.place}: the dataset has another key of item ids; {again}")
    rank, generate = options.rank, options.generate
    tasks = old.report.parts["ranker"].tasks if "ranker" in old.report.parts else ()
    if rank.tasks is None and tasks:
        rank = msgspec.structs.replace(rank, tasks=tasks)
    if rank.features is None and before.features:
        kept = tuple(one for one in before.features if not one.computed)
        rank = msgspec.structs.replace(rank, features=kept)
    if not is_code_count_set:
        made = old.report.parts.get("generator")
        was = before.item_codes if made is None else made.code_count
        count = _code_count(was, generate.code_count, len(dataset.names))
        generate = msgspec.structs.replace(generate, code_count=count)
    return msgspec.structs.replace(options, rank=rank, generate=generate)


def _code_count(was: tuple[int, ...], chosen: tuple[int, ...], num_items: int) -> tuple[int, ...]:
    """Keep the number of codes if there is room, else the number of levels if that is possible."""
    fits = [count for count in (was, *CODE_COUNTS) if len(count) == len(was)]
    roomy = [count for count in fits if prod(count) >= ROOM * num_items]
    full = [count for count in fits[::-1] if prod(count) >= num_items]
    return (*roomy, *full, chosen)[0] if was else chosen
