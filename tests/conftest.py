"""One thread for each process: several test processes share few cores, and the tensors of the tests are small."""

import collections
import gc
import os
import signal
import sys
import types

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; kernels and other children inherit it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; its children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop("COLUMNS", None)  # pytest-xdist gives it to its workers; text is then as wide as without a terminal


ONE_OF = {
    "checkpoint/": 5,
    "config/": 5,
    "data/": 5,
    "distributed/": 3,
    "error/": 7,
    "first_aid/": 3,
    "memory/": 7,
    "nan/guard/test_faults.py": 9,
    "nan/guard/test_ranks": 11,
    "nan/guard/": 7,
    "nan/test_causes.py": 5,
    "nan/test_healthy_models.py": 3,
    "nan/test_programs.py": 49,
    "nan/test_replay.py": 3,
    "nan/test_search": 3,
    "nan/": 5,
    "notebook/test_notebooks.py": 7,
    "observe/test_interrupts.py": 5,
    "observe/test_step_hooks.py": 3,
    "precision/test_precision.py": 7,
    "stop/test_prompts.py": 5,
    "training/test_healthy.py": 25,
    "training/watch/test_report.py": 7,
    "training/": 9,
    "test_never_hurts.py": 5,
    "test_patients.py::test_sick_patient_gets_its_cause_and_only_that[checkpoint/": 3,
    "test_patients.py::test_sick_patient_gets_its_cause_and_only_that[training/": 5,
    "test_patients.py::test_healthy_twin_is_left_in_peace[training/": 7,
    "test_patients.py::test_healthy_twin_is_left_in_peace[": 5,
    "test_same_bits.py": 7,
}
"""Of a list of at least three alike situations in such files (or with such names) one of so many is run; all of them
where NBDEBUG_ALL_TESTS is set (`make test-all`). The first line that fits holds. Odd numbers: of sick and healthy in
turn an even one would take always the same."""


ONLY_WITH_ALL = (
    "benchmarks/test_benchmarks.py::test_every_tool_has_a_row_with_numbers_or_a_reason",
    "benchmarks/test_benchmarks.py::test_only_what_is_not_installed_is_skipped",
    "benchmarks/test_guard_benchmark.py",
    "benchmarks/test_preflight_benchmark.py",
    "benchmarks/test_watch.py",
    "distributed/test_ranks.py::test_a_rank_that_does_not_come_to_the_groups_making",
    "browser/test_grad_watch.py::test_a_saved_notebook_keeps",
    "browser/test_nbdebug.py::test_a_saved_notebook_keeps_what_stood_in_it[True]",
    "browser/test_stepper.py::test_a_saved_notebook_keeps_where_it_stood",
    "memory/test_fit.py::test_what_does_not_fit_is_named_with_what_would",
    "memory/test_fit_card.py::test_a_card_that_is_not_here",
    "nan/guard/test_compiled.py::test_a_compiled_optimizer_step",
    "nan/guard/test_ranks.py::test_all_decide_alike_and_stay_alike[gradient of 1",
    "nan/guard/test_ranks.py::test_a_process_that_fails_is_not_held_back",
    "test_loops.py::test_the_answer_is_that_of_a_plain_loop[explain",
    "test_loops.py::test_the_answer_is_that_of_a_plain_loop[guard",
    "test_magics_grad_watch.py::test_live_in_a_kernel",
    "test_magics_free.py::test_bytes_come_back_in_a_real_kernel",
    "training/test_more.py::test_the_fault_is_named_and_the_twin_left_in_peace[recurrence_that_grows]",
    "test_compiled.py::test_inductor",
    "data/test_loaders.py::test_the_other_ranks_are_left_alone",
    "data/test_loaders.py::test_a_program[a_distributed_sampler",
    "error/test_shapes_near.py::test_what_a_library_has_flattened_has_the_users_name",
    "memory/test_oom.py::test_a_step_that_does_not_fit_under_a_real_limit",
    "memory/test_fit_card.py::test_the_largest_batch_is_that_of_the_card",
    "monitor/test_read_log.py::test_of_a_long_log_the_first_nan_is_found_to_the_line",
    "quality/test_check_outputs.py::test_a_copy_in_a_set_of_nearly_one_picture",
    "stepper/test_leaving.py::test_a_process_ends_while_a_step_waits",
    "test_magics_guard.py::test_in_a_kernel_the_report_stands_above_the_error",
    "training/watch/test_report.py::test_a_smoothed_loss_has_a_floor_and_comes_to_rest_on_it",
    "guard/test_ranks_faults.py",
    "guard/test_ranks_fsdp.py",
    "guard/test_soak.py",
    "test_architecture.py::test_the_walk_of_a_question_is_short",
    "speed/test_speed.py::test_the_trial_of_tf32_puts_a_switch_by_backend_back",
    "environment/test_check_environment.py::test_switches_by_backend_do_not_end_the_look",
    "training/test_zero_losses.py::test_a_run_that_comes_down_to_the_floor_of_smoothed_labels_is_no_plateau[0.9",
    "test_loops.py::test_the_answer_is_that_of_a_plain_loop[diagnose",
    "test_loops.py::test_the_answer_is_that_of_a_plain_loop[preflight",
    "test_it_runs_afresh[00_first_aid",  # test_cli runs it: the demo
    "test_it_runs_afresh[01",
    "test_it_runs_afresh[02",
    "test_it_runs_afresh[03_memory",
    "test_it_runs_afresh[04_precision",
    "test_it_runs_afresh[05_errors",
    "test_it_runs_afresh[06_guard",
    "test_it_runs_afresh[07_trainers",
    "test_it_runs_afresh[08_data",
    "test_it_runs_afresh[10_checkpoints",
    "test_it_runs_afresh[11_speed",
    "test_it_runs_afresh[13_quality",
    "test_it_runs_afresh[12_ranks",
    "test_it_runs_afresh[14_logs",
    "test_it_runs_afresh[15_four_faults",
    "browser/test_course.py",
    "test_a_wrapped_model_goes_over_to_the_new_group",
    "distributed/test_healthy.py",
    "distributed/test_ranks.py::test_a_healthy_program_is_not_disturbed",
    "distributed/test_ranks.py::test_a_launcher_that_is_killed_leaves_no_rank[torchrun",
    "distributed/test_engines.py::test_an_interrupt_ends_the_cell_on_all_ranks_and_the_next_one_runs[all",
    "distributed/test_ranks.py::test_a_script_that_starts_its_ranks_itself",
    "distributed/test_engines.py::test_engines_of_the_users_own_cluster_in_two_sets",
    "test_magics.py::test_a_kernel_names_its_cells_too",
    "test_magics_explain.py::test_in_a_kernel_the_report_stands_below_the_traceback",
)
"""What takes a quarter of a minute or more where something quicker tests most of it: a C++ compiler (the other backends
are tested each time), two processes (faults of the guard's own are tested in one, in test_faults), steps that grow
nothing, second ways to save a notebook, what a browser or another kernel also shows, the long notebooks."""
LONG = ("test_notebooks.py", "browser/", "test_patients.py", "test_cases.py", "nan/guard/test_ranks", "test_loops.py")
"""Files that take long: they are begun first, so that no process is left alone with one of them at the end."""


@pytest.fixture
def no_gc_callbacks():
    """Python drops an exception that comes up in a callback of the collector, and Hypothesis leaves one: a Ctrl-C."""
    callbacks = list(gc.callbacks)
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = callbacks


def pytest_collection_modifyitems(config, items):
    places = {item: str(item.path).replace(os.sep, "/") for item in items}
    items.sort(key=lambda item: not any(long in places[item] for long in LONG))
    if os.environ.get("NBDEBUG_ALL_TESTS"):
        return
    lists = [next((part for part in ONE_OF if f"tests/{part}" in item.nodeid), "") for item in items]
    lists = [(item.nodeid.partition("[")[0], part) for item, part in zip(items, lists, strict=True)]
    lengths, count, kept, left = collections.Counter(lists), collections.Counter(), [], []
    for item, among in zip(items, lists, strict=True):
        runs = lengths[among] < 3 or count[among] % ONE_OF.get(among[1], 1) == 0
        count[among] += 1
        (kept if runs and not _is_for_all(item.nodeid) else left).append(item)
    items[:] = kept
    if left:
        config.hook.pytest_deselected(items=left)


def _is_for_all(nodeid):
    second = "test_patients.py" in nodeid and "--" in nodeid  # a patient beside the one that is named as its code
    return second or any(long in nodeid for long in ONLY_WITH_ALL)


_begun: set[str] = set()
_other_files: set[str] = set()


def pytest_runtest_setup(item):
    """What the files before have left in this process is out of sight: of the collector, and of the looks at the
    user's own modules, which here are 200 files of tests with all that their globals hold. They would take seconds.
    Patients are modules of their own: what is left of one is out of the next one's sight, too."""
    first = str(item.path) not in _begun
    if first:
        _hide_other_files(item)
    if first or item.path.name == "test_patients.py":
        gc.collect()
        gc.freeze()


def _hide_other_files(item):
    from nbdebug.observe import variables

    if not _begun:
        of_user = variables._in_users_file
        variables._in_users_file = lambda name, file: name not in _other_files and of_user(name, file)
    _begun.add(str(item.path))
    _other_files.clear()
    _other_files.update({name for name in sys.modules if _is_test(name)} - _modules_of(item.module.__name__))


def _is_test(name):
    return name.startswith("tests.") and name.rpartition(".")[2].startswith("test_")


def _modules_of(name, known=frozenset()):
    """The module, and the other files of tests from which it has a function, a class or the module itself."""
    known = known | {name}
    for value in list(vars(sys.modules[name]).values()):
        owner = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        if isinstance(owner, str) and owner not in known and owner in sys.modules and owner.startswith("tests."):
            known |= _modules_of(owner, known)
    return known


def pytest_xdist_make_scheduler(config, log):
    """A file goes to one process, as with `--dist loadfile`; those that share browser and JupyterLab go together."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return "tests/browser" if nodeid.startswith("tests/browser/") else super()._split_scope(nodeid)

    return Scheduling(config, log)
