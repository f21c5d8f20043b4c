"""Ids are of the length that they say, also where the number is small, and differ."""

from __future__ import annotations

import pytest

from npu_gr.core import logs as ids


@pytest.mark.parametrize("num_bits", [64, 128])
def test_an_id_has_its_bits_in_hex(num_bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {ids.random_id(num_bits) for _ in range(100)}
    assert len(made) == 100
    assert all(len(one) == num_bits // 4 and int(one, 16) < 2**num_bits for one in made)
    monkeypatch.setattr(ids._RANDOM, "getrandbits", lambda _bits: 1)
    assert ids.random_id(num_bits) == "1".zfill(num_bits // 4)
