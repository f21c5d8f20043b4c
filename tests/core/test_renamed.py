"""Old names of keys and values work with one warning, but not together with the new names."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu_gr.core import renamed
from npu_gr.core.errors import ConfigError
from npu_gr.core.setting_types import settings_of
from npu_gr.core.settings import GONE, gather, load, override, parse
from npu_gr.route.config import RouterConfig
from npu_gr.service.config import Config
from npu_gr.simulate.config import SimulateConfig
from npu_gr.train.generate.train import GenerateOptions
from npu_gr.train.match.train import MatchOptions
from npu_gr.train.rank.options import TrainOptions
from npu_gr.train.site.configuration import SiteOptions

EVERY = (
    *(Config, RouterConfig, SimulateConfig),
    *(TrainOptions, GenerateOptions, MatchOptions, SiteOptions),
)
OLD = """
checkpoint: x
kv: {hbm_bytes: 1GiB}
features: {kind: none, source: {entry: a:b}}
brownout: {most: 1}
match: {vectors: v}
service: {unknown_items: refuse, unsorted_history: refuse}
recommend:
  sources: {match: 5, trunk: 7, neighbours: 9}
  order: fitted
  rank_share: .3
  rank_least_s: 10ms
  answer_s: 2ms
"""


@pytest.fixture(autouse=True)
def every_warning(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    renamed.warn.cache_clear()
    caplog.set_level(logging.WARNING, renamed.__name__)
    yield
    renamed.warn.cache_clear()


def write(folder: Path, text: str) -> Path:
    path = folder / "c.yaml"
    path.write_text(text)
    return path


def test_a_file_of_before_means_what_it_meant(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, OLD)
    config = load(path, Config)
    assert (config.kv_cache.hbm_bytes, config.history_store.kind) == (2**30, "none")
    assert config.feature_store is not None
    assert config.feature_store.entry == "a:b"
    assert config.brownout.max_step == 1
    assert config.service.unknown_items == config.service.unsorted_history == "reject"
    cascade = config.recommend
    assert cascade is not None
    assert cascade.order == "blended"
    assert list(cascade.sources.items()) == [("match", 5), ("shared_encoder", 7), ("neighbours", 9)]
    assert (cascade.max_rank_share, cascade.min_rank_s, cascade.margin_s) == (0.3, 0.01, 0.002)
    said = [record.getMessage() for record in caplog.records]
    assert f"config {path}: kv is now kv_cache; the old name works until npu_gr 0.3" in said
    assert len(said) == len(set(said)) == 11
    load(path, Config)
    assert len(caplog.records) == 11  # once a process
    assert gather(path, Config).origins["kv_cache.hbm_bytes"] == str(path)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("kv: {}\nkv_cache: {}", ("kv", "kv_cache")),
        (
            "features: {source: {entry: a}}\nfeature_store: {entry: b}",
            ("features.source", "feature_store"),
        ),
        ("brownout: {most: 1, max_step: 1}", ("brownout.most", "brownout.max_step")),
    ],
)  # fmt: skip
def test_both_names_are_an_error(tmp_path: Path, text: str, names: tuple[str, str]) -> None:
    old, new = names
    with pytest.raises(ConfigError, match=rf"{old} is now {new}, and both are given; remove {old}"):
        load(write(tmp_path, f"checkpoint: x\n{text}"), Config)


def test_variables_and_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, "checkpoint: x\nkv: {page_tokens: 32}")
    variables = {"NPU_GR_KV__HBM_BYTES": "7", "NPU_GR_FEATURES__SOURCE__ENTRY": "a:b"}
    found = load(path, Config, ["kv.dram_bytes=9", "features={kind: none}"], variables)
    kv = found.kv_cache
    assert (kv.page_tokens, kv.hbm_bytes, kv.dram_bytes) == (32, 7, 9)
    assert found.history_store.kind == "none"
    assert found.feature_store is not None
    assert found.feature_store.entry == "a:b"
    said = [record.getMessage().partition(";")[0] for record in caplog.records]
    assert "environment: kv.hbm_bytes is now kv_cache.hbm_bytes" in said
    assert "--set: kv.dram_bytes is now kv_cache.dram_bytes" in said
    both = variables | {"NPU_GR_KV_CACHE__HBM_BYTES": "8"}
    with pytest.raises(ConfigError, match="NPU_GR_KV__HBM_BYTES is now NPU_GR_KV_CACHE__HBM_BYTES"):
        load(path, Config, [], both)


def test_routers_simulations_and_trainers(tmp_path: Path) -> None:
    router = parse(
        "idle_s: 9\nhealth: {return_s: 2s}\ndiscovery: {file: f}", RouterConfig, "router"
    )
    assert (router.idle_timeout_s, router.health.slow_start_s) == (9.0, 2.0)
    shipped = Path(__file__).parents[2] / "configs/simulate.yaml"
    old = shipped.read_text().replace("\nkv_cache:", "\nkv:")
    assert "\nkv:" in old
    assert load(write(tmp_path, old), SimulateConfig) == load(shipped, SimulateConfig)
    trained = override(TrainOptions(), ["average_decay=.5", "item_length=0"])
    assert (trained.ema_decay, trained.item_init_norm) == (0.5, 0.0)
    assert override(GenerateOptions(), ["code_length=1"]).code_init_norm == 1.0
    assert override(MatchOptions(), ["pacing_looks=2"]).curriculum_validations == 2
    site = override(SiteOptions(), ["num_found=3", "rank.average_decay=.4"])
    assert (site.num_retrieved, site.rank.ema_decay) == (3, 0.4)


def test_a_key_of_another_configuration_stays_unknown() -> None:
    for text in ("idle_s: 1", "average_decay: .5", "health: {return_s: 1}"):
        with pytest.raises(ConfigError, match="unknown key"):
            parse(f"checkpoint: x\n{text}", Config, "c")


def test_every_row_leads_to_a_key_and_stands_in_the_notes() -> None:
    known = set().union(*(settings_of(cls) for cls in EVERY)) | {"recommend.sources.shared_encoder"}
    assert set(renamed.KEYS.values()) <= known
    assert set(renamed.VALUES) <= known
    assert not set(renamed.KEYS) & set(GONE)
    notes = (Path(__file__).parents[2] / "docs/upgrading.md").read_text()
    table = notes.partition("### Names\n")[2].partition("\n### ")[0]
    commands = {f"npu-gr {old}": f"npu-gr {new}" for old, new in renamed.COMMANDS.items()}
    rows = renamed.KEYS | renamed.METRICS | commands | renamed.REQUEST_VALUES
    missing = [
        f"{old} -> {new}"
        for old, new in rows.items()
        if old != "history_store.source" and not (f"`{old}`" in table and f"`{new}`" in table)
    ]
    assert not missing
    assert f"until npu_gr {renamed.UNTIL}" in table
