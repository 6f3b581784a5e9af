"""One thread for each process: several test processes share few cores, and the tensors of the tests are small."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; kernels and other children inherit it
