"""What a process may take: the machine's memory, or the least of its control groups' limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_gr.core.memory import HostMemory, free_memory, misfit, size_text, total_memory

GIB = 1 << 30
GROUP = "the limit of its control group"


def written(root: Path, files: dict[str, str | int]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def machine(root: Path, group: str) -> Path:
    return written(
        root,
        {
            "proc/meminfo": f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {6 << 20} kB",
            "proc/self/cgroup": group,
        },
    )


def test_without_a_limit_it_is_the_machine(tmp_path: Path) -> None:
    machine(tmp_path, "0::/user.slice")
    written(tmp_path, {"sys/fs/cgroup/user.slice/memory.max": "max"})
    assert total_memory(tmp_path) == HostMemory(16 * GIB, "the machine")
    assert free_memory(tmp_path) == HostMemory(6 * GIB, "the machine")


def test_a_group_of_version_2_and_those_around_it(tmp_path: Path) -> None:
    machine(tmp_path, "0::/pod/instance")
    at = "sys/fs/cgroup/pod"
    written(
        tmp_path,
        {
            f"{at}/memory.max": 8 * GIB,
            f"{at}/memory.current": 7 * GIB,
            f"{at}/memory.stat": f"anon 5\ninactive_file {2 * GIB}",
            f"{at}/instance/memory.max": 5 * GIB,
            f"{at}/instance/memory.current": GIB,
            f"{at}/instance/memory.stat": "inactive_file 0",
        },
    )
    assert total_memory(tmp_path) == HostMemory(5 * GIB, GROUP)
    # that around it is fuller; cached files of 2 GiB are given back when they are needed
    assert free_memory(tmp_path) == HostMemory(3 * GIB, GROUP)


def test_a_group_of_version_1_that_is_mounted_as_the_root(tmp_path: Path) -> None:
    """As in a container, where the path of the group is that of the host."""
    machine(tmp_path, "12:cpu,cpuacct:/docker/x\n9:memory:/docker/x\n0::/docker/x")
    at = "sys/fs/cgroup/memory"
    written(
        tmp_path,
        {
            f"{at}/memory.limit_in_bytes": 2 * GIB,
            f"{at}/memory.usage_in_bytes": 2 * GIB,
            f"{at}/memory.stat": f"cache 0\ntotal_inactive_file {GIB // 2}",
        },
    )
    assert total_memory(tmp_path) == HostMemory(2 * GIB, GROUP)
    assert free_memory(tmp_path) == HostMemory(GIB // 2, GROUP)
    written(tmp_path, {f"{at}/memory.limit_in_bytes": 9223372036854771712})  # no limit
    assert free_memory(tmp_path) == HostMemory(6 * GIB, "the machine")


def test_what_is_unknown_limits_nothing(tmp_path: Path) -> None:
    assert total_memory(tmp_path) is free_memory(tmp_path) is None
    assert misfit("x", 1e30, None) == ""


def test_this_machine_has_some() -> None:
    total, free = total_memory(), free_memory()
    assert total is not None
    assert free is not None
    assert 0 < free.num_bytes < total.num_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(GIB, "1.0 GiB"), (1.5 * GIB, "1.5 GiB"), (5 << 20, "5.0 MiB")]
)
def test_sizes_in_words(num_bytes: float, text: str) -> None:
    assert size_text(num_bytes) == text
    words = misfit("m", num_bytes, HostMemory(1 << 20, "the machine"))
    assert words.startswith(
        f"m needs about {text} while the current version serves, but 1.0 MiB are free (the machine)"
    )
