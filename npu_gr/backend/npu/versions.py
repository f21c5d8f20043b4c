"""Which CANN and torch_npu the native operators are for: the one table, of which everything else is derived.

`ops/ascendc/build.sh` runs this file, `npu-gr doctor` asks it, docs/ascend.md and the extra `npu`
of pyproject.toml are compared with it by a test. Only the standard library is imported: build.sh
runs it before torch is looked for.

    python npu_gr/backend/npu/versions.py ASCEND_HOME_PATH TORCH_NPU_VERSION     prints 80500 for CANN 8.5.0
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


# Source: the table of compatible versions in Ascend/pytorch, July 2026. The kernels use no API that
# is younger than the first row's; the headers of older releases are not public, so nobody could
# look.
MATRIX = (
    Release("8.5.0", ("2.6.0.post5", "2.7.1.post2", "2.8.0.post2", "2.9.0")),
    Release("9.0.0", ("2.7.1.post4", "2.8.0.post4", "2.9.0.post2")),
    Release("9.1.0", ("2.7.1.post5", "2.9.0.post3", "2.10.0", "2.11.0", "2.12.0")),
)

# where a toolkit says its version: file (a glob), and what stands in it
_PLACES = (
    ("include/version/asc_devkit_version.h", r'ASC_DEVKIT_VERSION_STR\s+"([^"]+)"'),  # 9.x
    ("include/ascendc/asc_devkit_version.h", r'ASC_DEVKIT_VERSION_STR\s+"([^"]+)"'),  # 8.5
    ("*-linux/ascend_toolkit_install.info", r"(?m)^version=(.+)$"),
    ("version.cfg", r"_running_version=\[(?:[^\]:]*:)?([^\]]+)\]"),  # [component's own:CANN's]
    ("compiler/version.info", r"(?m)^version_dir=(\d.*)$"),
    ("compiler/version.info", r"(?m)^Version=(.+)$"),
    ("version.info", r"(?m)^Version=(.+)$"),
)


class VersionError(ValueError):
    """A toolkit or a torch_npu for which there are no native operators.

    The message says which there are.
    """


def _numbers(version: str) -> tuple[int, int, int]:
    """Read 8.5.0, 8.3.RC1, 9.1.0-beta.3, 2.9.0.post2 or 2.13.0+cpu.

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
NEWEST_TORCH_NPU = minor(MATRIX[-1].torch_npu[-1])


def requirement() -> str:
    """Return what the extra `npu` asks of torch-npu."""
    major, least, _ = _numbers(NEWEST_TORCH_NPU)
    return f"torch-npu>={LEAST_TORCH_NPU},<{major}.{least + 1}"


def number(cann: str) -> int:
    """Return a CANN version as one number, which the kernels are compiled with: 80500 for 8.5.0."""
    major, minor_, patch = _numbers(cann)
    return major * 10_000 + minor_ * 100 + patch


def cann_at(home: Path) -> str | None:
    """Return the version of the toolkit at ASCEND_HOME_PATH as its own files tell it; None = none of them does."""
    for place, pattern in _PLACES:
        for path in sorted(home.glob(place)):
            found = re.search(pattern, path.read_text(errors="replace"))
            if found and re.match(r"\d+\.\d+", found[1].strip()):
                return found[1].strip()
    return None


def check(cann: str, torch_npu: str) -> str:
    """Check a toolkit and a torch_npu against the table.

    Returns:
        "", or a warning in words: one of them is newer than the table.

    Raises:
        VersionError: there are no native operators for this pair.
    """
    if _numbers(cann) < _numbers(LEAST_CANN):
        raise VersionError(f"CANN {cann}: the kernels need {LEAST_CANN} or later")
    if _numbers(cann)[:2] > _numbers(NEWEST_CANN)[:2]:
        return f"CANN {cann} is newer than {NEWEST_CANN}, the newest that is known here"
    row = [each for each in MATRIX if _numbers(each.cann)[:2] <= _numbers(cann)[:2]][-1]
    if minor(torch_npu) in map(minor, row.torch_npu):
        return ""
    if _numbers(torch_npu)[:2] > _numbers(NEWEST_TORCH_NPU)[:2]:
        return (
            f"torch_npu {torch_npu} is newer than {NEWEST_TORCH_NPU}, the newest that is known here"
        )
    raise VersionError(
        f"torch_npu {torch_npu} was not made for CANN {cann}, these were: "
        f"{', '.join(row.torch_npu)}"
    )


def table() -> str:
    """Format the matrix as Markdown, as it stands in docs/ascend.md."""
    lines = ["| CANN | torch_npu |", "|---|---|"]
    lines += [f"| {each.cann} | {', '.join(each.torch_npu)} |" for each in MATRIX]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the number of the toolkit's CANN.

    Exit status 2 with the reason if the pair has no native operators.
    """
    home, torch_npu = arguments
    cann = cann_at(Path(home))
    try:
        if cann is None:
            raise VersionError(
                f"no file under {home} says which CANN it is: is it the toolkit's folder?"
            )
        warning = check(cann, torch_npu)
    except VersionError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if warning:
        sys.stderr.write(f"warning: {warning}\n")
    sys.stdout.write(f"{number(cann)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
