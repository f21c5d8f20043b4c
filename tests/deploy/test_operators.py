"""An image for an NPU has the operators, or is not made; tests/ops/test_pretended.py builds them.

`deploy/operators.sh` is what deploy/Dockerfile runs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


@pytest.mark.parametrize(
    ("given", "status", "says"),
    [
        ({}, 0, ""),
        ({"SOC_VERSION": "none", "ASCEND_HOME_PATH": "/cann"}, 0, ""),
        ({"ASCEND_HOME_PATH": "/cann"}, 2, "BASE has CANN: give --build-arg SOC_VERSION="),
        ({"SOC_VERSION": "ascend910b1"}, 2, "SOC_VERSION is ascend910b1, and BASE has no CANN"),
        (
            {"SOC_VERSION": "ascend910b1", "ASCEND_HOME_PATH": "/nowhere"},
            2,
            "build.sh: ASCEND_HOME_PATH is /nowhere, which is no folder",
        ),
    ],
)
def test_no_image_for_an_npu_is_without_operators(
    tmp_path: Path, given: dict[str, str], status: int, says: str
) -> None:
    script = ROOT / "deploy" / "operators.sh"
    done = subprocess.run(
        ["bash", str(script), sys.executable, str(tmp_path / "out")],
        env={"PATH": os.environ["PATH"]} | given,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert says in done.stderr


def test_the_last_stage_takes_what_the_script_made() -> None:
    stages = re.findall(r"(?m)^FROM (\S+)(?: AS (\w+))?$", DOCKERFILE)
    assert stages == [("${BASE}", "build"), ("build", "npu"), ("${BASE}", "")]
    npu, last = DOCKERFILE.split("FROM ")[-2:]
    assert "bash deploy/operators.sh /opt/npu-gr/bin/python" in npu
    assert "COPY --from=npu /opt/npu-gr /opt/npu-gr" in last
    assert "HwHiAiUser" in last
