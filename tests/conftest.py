"""One thread a test process: the runner already uses every core, and threads that spin for each other cost more."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
