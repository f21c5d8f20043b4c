"""python -m benchmarks NAME: run a benchmark, from a checkout. Benchmarks are not in the wheel."""

import os

from benchmarks.frame import bench
from npu_gr.core.process import set_up_process

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    # before numpy loads, the only way for every BLAS; --threads is for torch
    os.environ[_name] = "1"
set_up_process()  # before torch loads
bench(prog_name="python -m benchmarks")
