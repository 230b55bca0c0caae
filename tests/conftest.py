"""Settings of the whole test run."""

import os
import signal

# The tests run in parallel processes and on small tensors: more threads than that only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background job ignores Ctrl-C, and so would every process that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
