"""python -m benchmarks NAME: every measurement by its name, from a checkout.

Nothing of it ships.
"""

import os

from benchmarks.frame import bench
from npu_gr.core.process import set_up_process

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    # before numpy loads: no other way holds for every BLAS; torch has --threads
    os.environ[_name] = "1"
set_up_process()  # before torch loads
bench(prog_name="python -m benchmarks")
