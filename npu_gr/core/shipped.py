"""Files that ship beside the code: configurations, dashboards, runbooks, deployments, sources of the native ops.

In a clone, and in an editable installation of one, they are the repository's own. A wheel has
copies of them inside the package, which setup.py makes.
"""

from __future__ import annotations

from pathlib import Path

from npu_gr.core.errors import ConfigError

_PACKAGE = Path(__file__).parents[1]
COPIES = "_data"  # of the package: setup.py fills it


def path(name: str) -> Path:
    """Return where a file or folder is, by its path in the repository, e.g. `configs/cpu.yaml`.

    Raises:
        ConfigError: this installation has no such file.
    """
    copies = _PACKAGE / COPIES
    found = (copies if copies.is_dir() else _PACKAGE.parent) / name
    if not found.exists():
        raise ConfigError(f"{name} is no part of this installation: {found} does not exist")
    return found


def found(given: Path) -> Path:
    """Return a path as it is given.

    If nothing is there and such a file ships, the one that ships.
    """
    if given.exists() or given.is_absolute():
        return given
    try:
        return path(str(given))
    except ConfigError:
        return given  # who opens it says what is wrong


def schema_line(name: str = "configs/schema.json") -> str:
    """Return the first line of a YAML file that we write: editors complete and check it by the schema that it names."""
    return f"# yaml-language-server: $schema={path(name).as_uri()}\n"
