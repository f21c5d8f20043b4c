"""Train on the two domains of DisenCDR, if NPU_GR_DISENCDR names their folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from npu_gr.train.match.domains import read_domains

FOLDER = os.environ.get("NPU_GR_DISENCDR", "")


@pytest.mark.skipif(
    not FOLDER, reason="NPU_GR_DISENCDR does not name the folder of the DisenCDR data"
)
def test_the_files_are_read_as_their_page_counts_them() -> None:
    sport, phone = Path(FOLDER) / "sport_phone", Path(FOLDER) / "phone_sport"
    both = read_domains(sport / "train.txt", phone / "train.txt", phone / "test.txt")
    assert (len(both.source.users), len(both.target.users)) == (50_558, 42_446)
    assert len(both.test.users) == 3999
    assert len(both.users) == 4998
