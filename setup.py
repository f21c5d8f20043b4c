"""Builds the CPU kernels beside the package, copies what ships into a wheel, and describes it.

They need nothing but a C++ compiler; without one they are left out, and `npu-gr build-ops --cpu`
makes them.
"""

import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

# -ffp-contract=fast and not -ffast-math: a logit of -inf means something
FLAGS = Path("ops/cpu/flags.txt").read_text().split()
COPIES = Path("npu_gr/_data")  # where `npu_gr.core.shipped` looks
SHIPPED = ("configs", "dashboards", "docs/runbooks", "deploy", "ops/ascendc", "ops/cpu")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "preview", "mutate.py", "*.so")


def native(name: str, sources: str) -> Extension:
    """Describe a library of our C++, which ctypes loads.

    It is never imported, and knows neither Python nor torch.
    """
    return Extension(
        name,
        sources=sorted(glob(f"{sources}/*.cpp")),
        depends=sorted(glob(f"{sources}/*.h")),
        extra_compile_args=FLAGS,
        extra_link_args=["-pthread", "-static-libgcc", "-static-libstdc++"],
        language="c++",
        optional=True,
        py_limited_api=True,
    )


libraries = [native("npu_gr.backend.cpu._native", "ops/cpu")]


class WithCopies(build_py):  # type: ignore[misc]  # setuptools has no types
    """Copies what ships beside the code; an editable installation has the repository itself."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        copies = Path(self.build_lib) / COPIES
        shutil.rmtree(copies, ignore_errors=True)  # of an earlier build
        for name in SHIPPED:
            shutil.copytree(name, copies / name, ignore=LEFT_OUT)


class AtOnce(build_ext):  # type: ignore[misc]
    """Compiles the sources of a library at once: one for each instruction set, 15 s each."""

    def build_extensions(self) -> None:
        compile_ = self.compiler.compile

        def at_once(sources: Sequence[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor() as pool:
                objects = pool.map(lambda source: compile_([source], **options), sources)
                return [path for paths in objects for path in paths]

        self.compiler.compile = at_once
        super().build_extensions()


def description() -> str:
    """Return README.md for the page of a package index, where relative links lead nowhere.

    They are words there. A picture is left out with the line in italics below it, and so is the
    last section, which is nothing but links.
    """
    text = Path("README.md").read_text().partition("\n## More\n")[0]
    text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n(\n\*[^*]*\*\n)?", "", text)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


setup(
    ext_modules=libraries,
    cmdclass={"build_ext": AtOnce, "build_py": WithCopies},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    long_description=description(),
    long_description_content_type="text/markdown",
)
