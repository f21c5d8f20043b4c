"""Builds the CPU kernels beside the package: nothing but a C++ compiler is needed, and without one it is left out."""

from glob import glob

from setuptools import Extension, setup

FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-ffp-contract=fast",  # not -ffast-math: a logit of -inf means something
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
]
SOURCES = ["dispatch", "isa_generic", "isa_avx2", "isa_avx512", "isa_avx512_bf16"]

kernels = Extension(
    "npu_gr.backend.cpu._native",  # loaded by ctypes, never imported: it knows neither Python nor torch
    sources=[f"ops/cpu/{name}.cpp" for name in SOURCES],
    depends=sorted(glob("ops/cpu/*.h")),
    extra_compile_args=FLAGS,
    extra_link_args=["-static-libgcc", "-static-libstdc++"],
    language="c++",
    optional=True,
    py_limited_api=True,
)
setup(ext_modules=[kernels], options={"bdist_wheel": {"py_limited_api": "cp311"}})
