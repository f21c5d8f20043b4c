"""The library is built where possible, loads at every instruction set, or says what is missing."""

from __future__ import annotations

import ctypes
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

from npu_gr.backend.choose import choose
from npu_gr.backend.cpu import backend as cpu
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.backend.cpu.library import ISAS, Native, NativeError, Table, load, supported
from npu_gr.core.errors import ConfigError


def test_an_installed_package_has_its_kernels() -> None:
    if not shutil.which("g++"):
        pytest.skip("there is no g++: the package runs without its kernels")
    assert supported(), "run `python setup.py build_ext --inplace`, or install the package again"


def test_every_instruction_set_names_itself(native: Native) -> None:
    assert native.isa in ISAS
    assert native.vector_bytes in (16, 32, 64)
    assert native.has_bf16_dot == (native.isa == "avx512_bf16")
    assert native.kernels.probe_flops_f32 > 0


def test_the_read_probe_reads_everything_once(native: Native) -> None:
    for count in (0, 1, 15, 1000, 4099):
        data = np.ones(count, np.float32)
        assert native.kernels.probe_read(data.ctypes.data, count) == count


def test_the_best_is_the_default() -> None:
    if not supported():
        pytest.skip("no kernels")
    assert load().isa == supported()[0]
    assert CPUBackend().kernels == supported()[0]
    assert CPUBackend(isa=supported()[-1]).kernels == supported()[-1]
    assert CPUBackend("off").kernels == "torch"


def test_an_unknown_instruction_set_is_rejected() -> None:
    if not supported():
        pytest.skip("no kernels")
    with pytest.raises(NativeError, match="no kernels for 'mmx'"):
        load("mmx")


def test_without_a_library_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "load", lambda isa: load(isa, tmp_path / "_native.abi3.so"))
    with caplog.at_level(logging.WARNING):
        assert choose("cpu").kernels == "torch"
    assert "was not built" in caplog.text
    with pytest.raises(ConfigError, match=r"required, but _native.abi3.so was not built"):
        choose("cpu", "require")
    assert choose("cpu", "off").kernels == "torch"
    with pytest.raises(ConfigError, match="require is for the backends cpu"):
        choose("reference", "require")


def test_a_file_that_is_no_library_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(b"not ELF")
    with pytest.raises(NativeError, match="cannot be loaded"):
        load("", tmp_path / "broken.so")


def test_another_versions_table_is_rejected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not supported():
        pytest.skip("no kernels")
    monkeypatch.setattr("npu_gr.backend.cpu.library.ABI", -1)
    load.cache_clear()
    try:
        with pytest.raises(NativeError, match="built from other sources"):
            load()
    finally:
        load.cache_clear()


def test_the_table_has_no_holes() -> None:
    """Every field is 8 bytes, in C and here: a shift by one would call the wrong function."""
    assert ctypes.sizeof(Table) == 8 * len(Table._fields_)
