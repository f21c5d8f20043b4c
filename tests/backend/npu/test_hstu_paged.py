"""A fake of Huawei's paged operator: layouts, limits, clear errors, a ranker without a bias."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npu_gr.backend import checks
from npu_gr.backend.calls import BiasTables, HstuCall, HstuShape
from npu_gr.backend.choose import choose
from npu_gr.backend.npu import device as npu_device
from npu_gr.backend.npu.backend import NPUBackend
from npu_gr.backend.npu.hstu_paged import PAGE_TOKENS, PagedHstu
from npu_gr.backend.reference import ReferenceBackend
from npu_gr.core.errors import ConfigError
from npu_gr.model.hstu_layer import Segment
from tests.backend.npu import paged
from tests.backend.npu.fake_device import FakeRuntime
from tests.models import CPU, events, tiny_model

REFERENCE = ReferenceBackend()


@pytest.fixture
def npu() -> Iterator[FakeRuntime]:
    made = FakeRuntime()
    with made.recording():
        yield made


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    with torch.library._scoped_library("npu_gr_paged", "FRAGMENT") as held:
        yield paged.install(monkeypatch, tmp_path, held)


def backend_with(npu: FakeRuntime, library: Path) -> NPUBackend:
    return NPUBackend("off", npu.as_npu(), hstu_library=library)


@settings(
    deadline=None,
    derandomize=True,
    max_examples=30,
    # the library and the device are the same for all
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    rows=st.integers(1, 5),
    past=st.lists(st.sampled_from([1, 3, 127, 128, 131]), max_size=3),
    seed=st.integers(0, 99),
)
def test_the_paged_operator_serves_any_slabs(
    library: Path, npu: FakeRuntime, rows: int, past: list[int], seed: int
) -> None:
    backend = backend_with(npu, library)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(rows, 2, 16, generator=generator) for _ in range(3))

    def rows_of(count: int) -> torch.Tensor:
        return torch.randn(count, 2, 16, generator=generator)

    slabs = [(rows_of(m), rows_of(m)) for m in past]
    arena = torch.randn(5 * PAGE_TOKENS, 2, 16, generator=generator)  # a slab whose memory goes on
    slabs.append((arena[: PAGE_TOKENS + 5], arena[PAGE_TOKENS : 2 * PAGE_TOKENS + 5]))
    num_past = sum(len(slab[0]) for slab in slabs)
    times, zero = torch.zeros(num_past + rows, dtype=torch.int64), torch.zeros(2, 64)
    bias, fell = BiasTables(zero, zero), list[str]()
    backend.on_fallback = fell.append
    call = HstuCall(q, k, v, slabs, times, bias, 0.25)
    torch.testing.assert_close(
        backend.hstu_causal(call), REFERENCE.hstu_causal(call), rtol=1e-4, atol=1e-4
    )
    call = call._replace(times=times[rows:])
    torch.testing.assert_close(
        backend.hstu_targets(call), REFERENCE.hstu_targets(call), rtol=1e-4, atol=1e-4
    )
    assert not fell


def test_many_targets_go_in_parts_and_new_rows_behind_a_page(
    library: Path, npu: FakeRuntime
) -> None:
    backend = backend_with(npu, library)
    q, k, v = (
        torch.randn(1030, 1, 16, generator=torch.Generator().manual_seed(n)) for n in range(3)
    )
    zero, times = torch.zeros(1, 64), torch.zeros(9, dtype=torch.int64)
    history = [(k[:5], v[:5]), (k[5:9], v[5:9])]
    call = HstuCall(q, k, v, history, times, BiasTables(zero, zero), 0.25)
    torch.testing.assert_close(
        backend.hstu_targets(call), CPU.hstu_targets(call), rtol=1e-4, atol=1e-4
    )
    rows, times = slice(9, 12), torch.zeros(12, dtype=torch.int64)
    call = HstuCall(
        q[rows], k[rows], v[rows], [(k[:9], v[:9])], times, BiasTables(zero, zero), 0.25
    )
    torch.testing.assert_close(
        backend.hstu_causal(call), CPU.hstu_causal(call), rtol=1e-4, atol=1e-4
    )


def test_a_layer_with_a_bias_falls_back_counted_and_said_once(
    library: Path, npu: FakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    backend, fell = backend_with(npu, library), list[str]()
    backend.on_fallback = fell.append
    q = torch.randn(4, 2, 16)
    bias, times = BiasTables(torch.ones(2, 8), torch.zeros(2, 64)), torch.arange(4)
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        call = HstuCall(q, q, q, [], times, bias, 0.1)
        torch.testing.assert_close(backend.hstu_causal(call), REFERENCE.hstu_causal(call))
        backend.hstu_targets(call._replace(cached=[(q, q)], query_time=9))
    assert fell == ["hstu_attention"] * 6
    assert sum("hstu_paged" in line for line in caplog.messages) == 1


def test_a_bias_at_an_address_that_had_none_is_seen(library: Path, npu: FakeRuntime) -> None:
    """As after a reload of the model: memory is used again."""
    found = backend_with(npu, library)._paged
    assert found is not None
    q, memory = torch.randn(4, 2, 16), torch.zeros(2, 64)
    assert found.takes(q, q, BiasTables(memory.view(2, 64), memory.view(2, 64)), 0)
    memory.fill_(1.0)
    assert not found.takes(q, q, BiasTables(memory.view(2, 64), memory.view(2, 64)), 0)


@pytest.mark.parametrize(
    ("rows", "heads", "width", "dtype", "tokens"),
    [
        (0, 2, 16, torch.float32, 0),
        (4, 17, 16, torch.float32, 0),
        (4, 2, 24, torch.float32, 0),
        (4, 2, 528, torch.float32, 0),
        (4, 2, 16, torch.float64, 0),
        (4, 2, 16, torch.float32, 20_477),
    ],
)
def test_the_paged_operators_limits(
    library: Path,
    npu: FakeRuntime,
    rows: int,
    heads: int,
    width: int,
    dtype: torch.dtype,
    tokens: int,
) -> None:
    found = backend_with(npu, library)._paged
    assert found is not None
    q, zero = torch.zeros(rows, heads, width, dtype=dtype), torch.zeros(heads, 64)
    assert not found.takes(q, q, BiasTables(zero, zero), tokens)
    fits = torch.zeros(4, 2, 16)
    assert found.takes(fits, fits, BiasTables(zero, zero), 20_476)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("", "registers no operator mxrec::hstu_paged"),
        (
            paged.OLDER,
            "too old, it has no argument k_cache, v_cache, deterministic; build a newer",
        ),
    ],
)
def test_another_library_is_rejected_in_words(
    npu: FakeRuntime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, schema: str, why: str
) -> None:
    with torch.library._scoped_library("npu_gr_other", "FRAGMENT") as held:
        path = paged.install(monkeypatch, tmp_path, held, schema)
        with pytest.raises(ConfigError, match=f"hstu_library: .*{why}"):
            backend_with(npu, path)


def test_a_library_that_is_not_there_or_does_not_load_is_rejected(
    npu: FakeRuntime, tmp_path: Path
) -> None:
    path = tmp_path / "no.so"
    with pytest.raises(
        ConfigError,
        match=r"hstu_library: no file .*no\.so: build it from "
        r"Ascend/RecSDK",
    ):
        backend_with(npu, path)
    path.write_bytes(b"no library")
    with pytest.raises(ConfigError, match=r"hstu_library: .*no\.so does not load"):
        backend_with(npu, path)
    with pytest.raises(
        ConfigError, match="hstu_library: the operator is for the backend npu, not cpu"
    ):
        choose("cpu", hstu_library=str(path))


def test_an_operator_that_disagrees_is_rejected(
    library: Path, npu: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = PagedHstu._call
    monkeypatch.setattr(PagedHstu, "_call", lambda self, *a: right(self, *a) * 1.01)
    with pytest.raises(
        ConfigError,
        match=r"something else: 5 history rows behind 131 tokens in "
        r"torch\.float32",
    ):
        backend_with(npu, library)


def test_a_ranker_without_relative_bias_runs_it(library: Path, npu: FakeRuntime) -> None:
    """Cold, and in two parts through a cache; its checkpoint holds no tables."""
    model = tiny_model(relative_bias="none", qk_dim=16, v_dim=16)
    assert not any(
        "bias" in name and name.endswith(("position_bias", "time_bias"))
        for name in model.state_dict()
    )
    backend, fell = backend_with(npu, library), list[str]()
    backend.on_fallback = fell.append
    history = events(700)
    segment = Segment(
        items=torch.from_numpy(history.items),
        actions=torch.from_numpy(history.actions).long(),
        times=torch.from_numpy(history.timestamps),
        candidates=torch.arange(30),
        candidate_time=int(history.timestamps[-1]) + 60,
    )
    (got,) = model(backend, [segment])
    (want,) = model(CPU, [segment])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert not fell, "700 rows go in parts of 512"
    (want,) = model(backend.running("torch"), [segment])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_the_paged_operator_is_a_way_of_what_it_takes_alone(
    library: Path, npu: FakeRuntime
) -> None:
    backend = backend_with(npu, library)
    fits = HstuShape(
        2, 16, 16, torch.float32, torch.float32, 64, 32, is_joined=False, is_biased=False
    )
    assert backend.hstu_ways(fits) == ("mxrec", "torch")
    for other in (
        {"is_biased": True},
        {"qk_dim": 24},
        {"v_dim": 32},
        {"num_heads": 17},
        {"dtype": torch.float64},
    ):
        assert backend.hstu_ways(fits._replace(**other)) == ("torch",)
    assert backend.running("mxrec").ops["hstu_attention"] == "mxrec"
    assert backend.running("mxrec")._paged is backend._paged
    assert backend.running("torch")._paged is None


def test_the_doctor_checks_the_library(
    library: Path, npu: FakeRuntime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(npu_device, "find", lambda: npu.as_npu())
    found = {each.name: each for each in checks.device_findings("npu", library)["npu"]}[
        "mxrec::hstu_paged"
    ]
    assert found.state is checks.FindingState.OK
    found = {each.name: each for each in checks.device_findings("npu", tmp_path / "no.so")["npu"]}[
        "mxrec::hstu_paged"
    ]
    assert found.state is checks.FindingState.BROKEN
    assert "no file" in found.found
    assert "hstu_library" in found.remedy
    assert "mxrec::hstu_paged" not in {each.name for each in checks.device_findings("npu")["npu"]}
