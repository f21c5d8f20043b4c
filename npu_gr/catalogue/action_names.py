"""Names of actions beside a generator's checkpoint. A ranker's has them itself; a Hugging Face folder has no place."""

from __future__ import annotations

from pathlib import Path

import msgspec

from npu_gr.core.errors import DataError
from npu_gr.core.names import ActionNames

FILE = "actions.json"  # a list of texts: the name of each index


def load(folder: Path) -> ActionNames | None:
    """Read `FILE` of a folder; None = there is none.

    Raises:
        DataError: it is broken.
    """
    path = folder / FILE
    try:
        names = msgspec.json.decode(path.read_bytes(), type=list[str])
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {error}") from error
    if len(set(names)) != len(names):
        raise DataError(f"{path}: a name stands there twice")
    return ActionNames(names)
