"""Checks that a configuration and a second version of a model fit in memory, before they are read.

Without them the kernel kills the process, with the version that serves.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from npu_gr.core.errors import ConfigError
from npu_gr.core.memory import HostMemory, free_memory, misfit, size_text, total_memory
from npu_gr.service.config import Config

if TYPE_CHECKING:  # `npu-gr check-config` needs no torch
    from npu_gr.backend.base import Backend

# Memory that loading a ranker takes at most, by the bytes of its files: the tensors of the file,
# the model, its table of items in parts and as a whole. 2.9 was measured on a million items; the
# rest is for the vocabulary and the warm-up.
RANKER_LOADS = 3.5
# on a device: the model, and its table in parts and as a whole
RANKER_ON_DEVICE = 3.0
RANKER_ON_HOST = 2.0  # on the way to a device: the tensors of the file, and the model
# A generator is read tensor by tensor into its place, so it takes itself, and some.
GENERATOR_LOADS = 1.25


def size_errors(config: Config, total: HostMemory | None = None) -> dict[str, str]:
    """Compare what a configuration allocates at the start with the memory of the machine.

    Args:
        config: The configuration.
        total: Memory of the machine; None = it is looked up, and limits nothing if it is unknown.

    Returns:
        Field -> what is wrong with it, with the limit; empty if all of it fits.
    """
    total = total_memory() if total is None else total
    if total is None:
        return {}
    limit = f"but this process can have {size_text(total.num_bytes)} ({total.limited_by})"
    sizes = _sizes(config)
    # grow with the traffic, so they are not in the sum
    caches = {
        "service.known_prefix_bytes": config.service.known_prefix_bytes,
        "server.max_receiving_bytes": config.server.max_receiving_bytes,
    }
    if config.generate is not None:
        caches["generate.filter_cache_bytes"] = config.generate.filter_cache_bytes
    if config.record is not None:
        caches["record.max_queue_bytes"] = config.record.max_queue_bytes
    errors = {
        name: f"{size_text(size)}, {limit}"
        for name, size in (sizes | caches).items()
        if size > total.num_bytes
    }
    if errors or (needed := sum(sizes.values())) <= total.num_bytes:
        return errors
    largest = max(sizes, key=sizes.__getitem__)
    others = ", ".join(name for name, size in sizes.items() if size and name != largest)
    return {largest: f"with {others} {size_text(needed)}, {limit}"}


def check_sizes(config: Config) -> None:
    """Check that the machine has the memory that a configuration allocates at the start.

    Raises:
        ConfigError: it has not; the message names the field and the limit.
    """
    for name, words in size_errors(config).items():
        raise ConfigError(f"{name}: {words}")


def _sizes(config: Config) -> dict[str, int]:
    """Return the bytes of host memory that the start takes, by field."""
    sizes = {}
    if config.checkpoint is not None:
        sizes["kv_cache.hbm_bytes"] = _on_host(config, config.kv_cache.hbm_bytes)
        sizes["kv_cache.dram_bytes"] = config.kv_cache.dram_bytes
        sizes["checkpoint"] = _file_bytes(Path(config.checkpoint))
        sizes["models.hot_item_bytes"] = _on_host(config, _hot_bytes(config.checkpoint, config))
    if config.generate is not None:
        sizes["generate.hbm_bytes"] = _on_host(config, config.generate.hbm_bytes)
        sizes["generate.dram_bytes"] = config.generate.dram_bytes
        sizes["generate.checkpoint"] = _file_bytes(Path(config.generate.checkpoint))
    return sizes


def _on_host(config: Config, hbm_bytes: int | str) -> int:
    """Return the bytes of an HBM tier that are host memory, as on a CPU."""
    return hbm_bytes if config.backend == "cpu" and isinstance(hbm_bytes, int) else 0


def _hot_bytes(folder: Path | str, config: Config) -> int:
    """Return the memory of item rows that are hot; 0 = the checkpoint is not sharded."""
    return config.models.hot_item_bytes if any(Path(folder).glob("*.rows")) else 0


def check_ranker_fits(folder: Path, config: Config, backend: Backend) -> None:
    """Check that a ranker can be loaded while another one serves.

    Args:
        folder: Folder of its checkpoint.
        config: Memory of the item rows of a sharded one.
        backend: Backend of the device.

    Raises:
        ConfigError: free memory is too small; the message has the sizes.
    """
    size, hot = _file_bytes(folder), _hot_bytes(folder, config)
    if backend.free_bytes() is None:
        _check_fits("checkpoint", folder, RANKER_LOADS * size + hot, free_memory())
    else:
        _check_fits("checkpoint", folder, RANKER_ON_HOST * size, free_memory())
        _check_fits("checkpoint", folder, RANKER_ON_DEVICE * size + hot, _of_device(backend))


def check_generator_fits(folder: Path, config: Config, backend: Backend) -> None:
    """Check that a generator can be loaded while another one serves.

    Args:
        folder: Folder of its checkpoint.
        config: Dtype of the model.
        backend: Backend of the device.

    Raises:
        ConfigError: free memory is too small; the message has the sizes.
    """
    each = 2 if config.dtype == "bfloat16" else 4
    size = GENERATOR_LOADS * each * _num_weights(folder)
    _check_fits("generate.checkpoint", folder, size, free_memory())
    _check_fits("generate.checkpoint", folder, size, _of_device(backend))


def _of_device(backend: Backend) -> HostMemory | None:
    free = backend.free_bytes()
    return None if free is None else HostMemory(free, f"{backend.name} device")


def _check_fits(field: str, folder: Path, needed: float, free: HostMemory | None) -> None:
    if words := misfit(folder, needed, free):
        raise ConfigError(f"{field}: {words}")


def _file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _num_weights(folder: Path) -> int:
    """Count the numbers in the tensors of a folder, by the headers of its files."""
    count = 0
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, framework="numpy") as opened:
                count += sum(prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
        except (OSError, SafetensorError):
            continue  # what reads the file says what is wrong
    return count
