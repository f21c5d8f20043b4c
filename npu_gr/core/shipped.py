"""Find shipped files: configurations, dashboards, runbooks, deployments, native sources.

In a clone or an editable installation they are in the repository. A wheel has copies in the
package, which setup.py makes.
"""

from __future__ import annotations

from pathlib import Path

from npu_gr.core.errors import ConfigError

_PACKAGE = Path(__file__).parents[1]
COPIES = "_data"  # folder of the copies in the package


def path(name: str) -> Path:
    """Return the location of a file or folder by its path in the repository (`configs/cpu.yaml`).

    Raises:
        ConfigError: the installation has no such file.
    """
    copies = _PACKAGE / COPIES
    found = (copies if copies.is_dir() else _PACKAGE.parent) / name
    if not found.exists():
        raise ConfigError(f"this installation has no {name}: {found} does not exist")
    return found


def found(given: Path) -> Path:
    """Return the given path; if it does not exist, that of the shipped file, if any."""
    if given.exists() or given.is_absolute():
        return given
    try:
        return path(str(given))
    except ConfigError:
        return given  # opening it raises the error


def schema_line(name: str = "configs/schema.json") -> str:
    """Return the first line of a YAML file, which names the schema for editors."""
    return f"# yaml-language-server: $schema={path(name).as_uri()}\n"
