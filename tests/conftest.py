"""One thread for each process: several test processes share few cores, and the tensors of the tests are small."""

import collections
import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; kernels and other children inherit it
os.environ.pop("COLUMNS", None)  # pytest-xdist gives it to its workers; text is then as wide as without a terminal


THIRDS = (
    "nan/guard/test_faults.py",
    "nan/guard/test_optimizers.py",
    "nan/guard/test_programs.py",
    "nan/guard/test_record_replay.py",
    "nan/guard/test_ranks_faults.py",
    "nan/test_programs.py",
    "notebook/test_notebooks.py",
    "test_same_bits.py",
    "training/test_healthy.py",
    "training/test_preflight_healthy.py",
    "training/watch/test_bits.py",
    "training/watch/test_norms.py",
)
"""Long lists of alike situations: every third is run; all of them where NBDEBUG_ALL_TESTS is set (`make test-all`)."""


ONLY_WITH_ALL = ("test_compiled.py::test_inductor",)
"""A minute of a C++ compiler; the other backends of torch.compile are tested each time."""
LONG = ("test_notebooks.py", "browser/", "test_patients.py", "nan/guard/test_ranks")
"""Files that take long: they are begun first, so that no process is left alone with one of them at the end."""


def pytest_collection_modifyitems(config, items):
    places = {item: str(item.path).replace(os.sep, "/") for item in items}
    items.sort(key=lambda item: not any(long in places[item] for long in LONG))
    if os.environ.get("NBDEBUG_ALL_TESTS"):
        return
    count, kept, left = collections.Counter(), [], []
    for item in items:
        function, _, situation = item.nodeid.partition("[")
        of_thirds = bool(situation) and places[item].endswith(THIRDS)
        count[function] += 1
        runs = not of_thirds or count[function] % 3 == 1
        (kept if runs and not function.endswith(ONLY_WITH_ALL) else left).append(item)
    items[:] = kept
    if left:
        config.hook.pytest_deselected(items=left)


_begun: set[str] = set()


def pytest_runtest_setup(item):
    """What the files before have left in this process is out of the collector's sight: looks at all live objects, and
    every `gc.collect`, would take seconds else."""
    if str(item.path) not in _begun:
        _begun.add(str(item.path))
        gc.collect()
        gc.freeze()
