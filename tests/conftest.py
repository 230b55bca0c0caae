"""Settings of the whole test run."""

import os

# The tests run in parallel processes and on small tensors: more threads than that only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
