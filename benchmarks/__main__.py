"""python -m benchmarks NAME: every measurement by its name, from a checkout; nothing of it ships."""

from benchmarks.commands import bench
from npu_gr.core.process import set_up_process

set_up_process()  # before torch loads
bench(prog_name="python -m benchmarks")
