"""What of PyTorch's state belongs to a thread: read where the step was asked for, set again where it runs.

Grad mode, inference mode, autocast, torch function and dispatch modes, the default device, hooks on saved tensors, the
current GPU and its stream are each thread's own. Default dtype, anomaly mode, deterministic algorithms, the switches of
the backends and random numbers are the process's. A step that waits needs its own of these, too: meanwhile the caller
leaves the context that has set them, or draws random numbers. `Shared` changes them over.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from nbdebug.observe.state import sources

KINDS = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")
_saved: Any = torch._C._autograd


class Caller:
    """The state of the thread that makes this; `resume` gives it to another thread, which it is left to."""

    def __init__(self) -> None:
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.forward_grad, self.view_replay = torch._C._is_fwd_grad_enabled(), torch._C._is_view_replay_enabled()
        self.autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _kinds()]
        self.cache = torch.is_autocast_cache_enabled()
        self.function_modes = _get_current_function_mode_stack()
        self.dispatch_modes = list(_get_current_dispatch_mode_stack())
        self.device_context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        self.saved_hooks = _saved_tensor_hooks()
        self.devices = [(module, module.current_device(), _streams(module)) for module in _accelerators()]
        self.threads = torch.get_num_threads()

    @contextlib.contextmanager
    def resume(self) -> Any:
        """In a thread that ends afterwards: what ends with it is not taken back."""
        torch.set_num_threads(self.threads)
        for module, device, streams in self.devices:
            module.set_device(device)
            for stream in streams:
                module.set_stream(stream)
            module.set_device(device)  # setting a stream makes its device the current one
        torch.set_autocast_cache_enabled(self.cache)
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        for hooks in self.saved_hooks:
            _saved._push_saved_tensors_default_hooks(*hooks)
        torch.autocast_increment_nesting()  # weights that autocast has cast stay cast until the step is over
        try:
            with torch.inference_mode(self.inference):  # sets all of autograd's switches, so the others come after it
                # Backward runs in this thread then, also a GPU's: a layer can wait in it without keeping the device's
                # own autograd thread, which the caller may need for a backward of theirs.
                torch._C._set_multithreading_enabled(False)
                torch._C._set_view_replay_enabled(self.view_replay)
                torch._C._set_fwd_grad_enabled(self.forward_grad)
                torch._C._set_grad_enabled(self.grad)
                self._modes()
                yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()

    def _modes(self) -> None:
        """Last: they would see everything that is done before."""
        if self.device_context is not None:
            torch._GLOBAL_DEVICE_CONTEXT.device_context = self.device_context
        for mode in self.dispatch_modes:
            _push_dispatch_mode(mode)
        for mode in self.function_modes:
            _push_function_mode(mode)


class Shared:
    """What the whole process has one of, and two owners who take turns. Each goes on where it has stopped."""

    def __init__(self) -> None:
        self._others = self._now()

    def change_over(self) -> None:
        """Keep what is the one's, put what is the other's in force."""
        mine, others = self._now(), self._others
        for name in mine.keys() & others.keys():  # a device that has been woken since has no other state yet
            others[name][1](others[name][2])
        self._others = mine

    def put_back(self) -> None:
        """What was in force when this was made."""
        for _, write, state in self._others.values():
            write(state)

    @staticmethod
    def _now() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]]:
        return {name: (read, write, read()) for name, read, write in (*_settings(), *sources())}


def _settings() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """Switches of the process: name, how to read, how to set."""
    yield "default dtype", torch.get_default_dtype, torch.set_default_dtype
    yield (
        "anomaly mode",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda state: torch.set_anomaly_enabled(*state),
    )
    yield ("deterministic algorithms", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode)
    for name in ("enabled", "benchmark", "deterministic"):
        yield (
            f"cudnn.{name}",
            functools.partial(getattr, torch.backends.cudnn, name),
            functools.partial(setattr, torch.backends.cudnn, name),
        )
    for name in ("flash", "mem_efficient", "math", "cudnn"):  # what torch.nn.attention.sdpa_kernel sets
        yield (
            f"attention by {name}",
            getattr(torch.backends.cuda, f"{name}_sdp_enabled"),
            getattr(torch.backends.cuda, f"enable_{name}_sdp"),
        )


def _kinds() -> list[str]:
    """The kinds of device that autocast knows."""
    found = []
    for kind in KINDS:
        with contextlib.suppress(RuntimeError):
            torch.is_autocast_enabled(kind)
            found.append(kind)
    return found


def _accelerators() -> list[Any]:
    """Those that have been used, and have streams."""
    return [module for kind in ("cuda", "xpu") if (module := getattr(torch, kind)).is_initialized()]


def _streams(module: Any) -> list[Any]:
    return [module.current_stream(device) for device in range(module.device_count())]


def _saved_tensor_hooks() -> list[tuple[Any, Any]]:
    """The default hooks on saved tensors, outermost first. They can be read one at a time only: taken off, put back.
    torch 2.6 can't read them: the step then runs without."""
    found: list[tuple[Any, Any]] = []
    if not hasattr(_saved, "_top_saved_tensors_default_hooks"):
        return found
    while (top := _saved._top_saved_tensors_default_hooks(False)) is not None:
        found.insert(0, top)
        _saved._pop_saved_tensors_default_hooks()
    for hooks in found:
        _saved._push_saved_tensors_default_hooks(*hooks)
    return found
