"""The program in the documentation runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import yaml

from npu_gr.core.settings import to_table
from npu_gr.model.weights import Checkpoint, save
from tests.models import tiny_model
from tests.serving import make_config

PAGE = Path(__file__).parent.parent / "docs/using.md"


def test_the_python_example_runs(tmp_path: Path) -> None:
    model = tiny_model(actions=("1", "2", "3", "4", "5"))
    ids = np.arange(model.config.num_items, dtype=np.int64)
    save(Checkpoint(model=model, item_ids=ids, name="tiny"), tmp_path / "checkpoint")
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(to_table(make_config(tmp_path))))
    [code] = [
        one
        for one in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
        if "instance(" in one
    ]
    assert {line.split()[1] for line in code.splitlines() if "npu_gr" in line} == {"npu_gr"}, (
        "only the public API"
    )
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("miss_full [")
