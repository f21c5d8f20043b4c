"""The table of the CANN and torch_npu releases that the native operators support.

`ops/ascendc/build.sh` and `npu-gr doctor` use it; a test compares docs/ascend.md, and the extra
`npu` of pyproject.toml, with it. Only the standard library is imported, because build.sh runs this
file before it looks for torch.

    # prints 80500 for CANN 8.5.0; --force goes on where there are no native operators
    python npu_gr/backend/npu/versions.py ASCEND_HOME_PATH TORCH_NPU_VERSION [--force]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple


class Release(NamedTuple):
    """A CANN release and the torch_npu releases that Huawei made for it."""

    cann: str
    torch_npu: tuple[str, ...]  # exact releases, oldest first


# Source: the table of compatible versions in Ascend/pytorch and, for 2.10.0.post2, its README, of
# August 2026. A test parses the kernels against each CANN here; older headers are not public.
MATRIX = (
    Release("8.5.0", ("2.6.0.post5", "2.7.1.post2", "2.8.0.post2", "2.9.0")),
    Release("9.0.0", ("2.7.1.post4", "2.8.0.post4", "2.9.0.post2", "2.10.0.post2")),
    Release("9.1.0", ("2.7.1.post8", "2.9.0.post6", "2.10.0.post4", "2.11.0", "2.12.0")),
    Release("9.2.0-beta.1", ()),
)

# files of a toolkit that contain its version: a glob and a pattern
_PLACES = (
    ("include/version/asc_devkit_version.h", r'ASC_DEVKIT_VERSION_STR\s+"([^"]+)"'),  # 9.x
    ("include/ascendc/asc_devkit_version.h", r'ASC_DEVKIT_VERSION_STR\s+"([^"]+)"'),  # 8.5
    ("*-linux/ascend_toolkit_install.info", r"(?m)^version=(.+)$"),
    ("version.cfg", r"_running_version=\[(?:[^\]:]*:)?([^\]]+)\]"),  # [component:CANN]
    ("compiler/version.info", r"(?m)^version_dir=(\d.*)$"),
    ("compiler/version.info", r"(?m)^Version=(.+)$"),
    ("version.info", r"(?m)^Version=(.+)$"),
)


class VersionError(ValueError):
    """No native operators for a toolkit; the message names the supported versions."""


def _numbers(version: str) -> tuple[int, int, int]:
    """Parse 8.5.0, 8.3.RC1, 9.1.0-beta.3, 2.9.0.post2 or 2.13.0+cpu.

    A release candidate counts as its release.
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if found is None:
        raise VersionError(f"{version!r} is no version")
    major, minor, patch = found.groups(default="0")
    return int(major), int(minor), int(patch)


def minor(version: str) -> str:
    """Return the first two numbers of a version, e.g. 2.9 of 2.9.0.post2."""
    return "{}.{}".format(*_numbers(version))


LEAST_CANN = MATRIX[0].cann
NEWEST_CANN = MATRIX[-1].cann
LEAST_TORCH_NPU = minor(MATRIX[0].torch_npu[0])
NEWEST_TORCH_NPU = minor([name for each in MATRIX for name in each.torch_npu][-1])


def requirement() -> str:
    """Return the requirement of the extra `npu` on torch-npu."""
    major, least, _ = _numbers(NEWEST_TORCH_NPU)
    return f"torch-npu>={LEAST_TORCH_NPU},<{major}.{least + 1}"


def number(cann: str) -> int:
    """Return a CANN version as the number that the kernels are compiled with: 80500 for 8.5.0."""
    major, minor_, patch = _numbers(cann)
    return major * 10_000 + minor_ * 100 + patch


def cann_at(home: Path) -> str | None:
    """Read the version of the toolkit at ASCEND_HOME_PATH from its files; None = not found."""
    for place, pattern in _PLACES:
        for path in sorted(home.glob(place)):
            found = re.search(pattern, path.read_text(errors="replace"))
            if found and re.match(r"\d+\.\d+", found[1].strip()):
                return found[1].strip()
    return None


def check(cann: str, torch_npu: str) -> str:
    """Check a toolkit and a torch_npu against the table.

    Only what is known to be wrong is rejected: a pair that the table lacks may work.

    Returns:
        A warning that Huawei does not name this pair; "" = none.

    Raises:
        VersionError: The kernels call what this CANN lacks.
    """
    if _numbers(cann) < _numbers(LEAST_CANN):
        raise VersionError(f"CANN {cann}: the kernels need {LEAST_CANN} or later")
    if _numbers(cann)[:2] > _numbers(NEWEST_CANN)[:2]:
        return f"CANN {cann} is newer than {NEWEST_CANN}, the newest that is known here"
    row = [each for each in MATRIX if _numbers(each.cann)[:2] <= _numbers(cann)[:2]][-1]
    if minor(torch_npu) in map(minor, row.torch_npu):
        return ""
    named = f", but {', '.join(row.torch_npu)}" if row.torch_npu else ""
    return f"Huawei names no torch_npu {torch_npu} for CANN {cann}{named}: an untested pair"


def table() -> str:
    """Format the matrix as Markdown, for docs/ascend.md."""
    lines = ["| CANN | torch_npu |", "|---|---|"]
    lines += [f"| {each.cann} | {', '.join(each.torch_npu) or 'none yet'} |" for each in MATRIX]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the number of the toolkit's CANN; return 2 if it has no native operators."""
    force = "--force" in arguments
    home, torch_npu = (each for each in arguments if each != "--force")
    cann = cann_at(Path(home))
    try:
        if cann is None:
            raise VersionError(
                f"no file under {home} says which CANN it is: is it the toolkit's folder?"
            )
        warning = check(cann, torch_npu)
    except VersionError as error:
        if not force:
            sys.stderr.write(f"{error}; --force builds all the same\n")
            return 2
        cann, warning = cann or NEWEST_CANN, f"{error}; goes on because of --force"
    if warning:
        sys.stderr.write(f"warning: {warning}\n")
    sys.stdout.write(f"{number(cann)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
