"""A real kernel, driven as a front end does it: cells, the prompt on the stdin channel, the debugger on the control
channel."""

from __future__ import annotations

import contextlib
import queue
import re
import time
from collections.abc import Iterable, Iterator
from typing import Any

from jupyter_client.manager import start_new_kernel

from tests.shell import in_this_checkout

WAIT = 60


class Kernel:
    """client: jupyter_client's. Cells are named as they are run."""

    def __init__(self, client: Any):
        self.client, self._number = client, 0

    def start(self, code: str, allow_stdin: bool = True) -> str:
        """Begin to run a cell; the id of its request."""
        return self.client.execute(code, allow_stdin=allow_stdin)

    def run(self, code: str, typed: Iterable[str] = (), allow_stdin: bool = True) -> str:
        """Run a cell, and type these lines at its prompts: all that it showed, errors too, without colours."""
        request, lines = self.start(code, allow_stdin), iter(typed)
        shown: list[str] = []
        until = time.monotonic() + WAIT
        while time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                if self.client.get_stdin_msg(timeout=0)["msg_type"] == "input_request":
                    self.client.input(next(lines))
            with contextlib.suppress(queue.Empty):
                message = self.client.get_iopub_msg(timeout=0.02)
                if message["parent_header"].get("msg_id") != request:
                    continue
                shown.append(_text(message))
                if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                    break
        else:
            raise TimeoutError("".join(shown))
        left = list(lines)
        assert not left, f"nobody asked for {left}: {''.join(shown)}"
        return re.sub(r"\x1b\[[0-9;]*m", "", "".join(shown))

    # -- the debugger -------------------------------------------------------------------------------------------------

    def debug(self, command: str, **arguments: Any) -> dict[str, Any]:
        """A request of the Debug Adapter Protocol; the body of its answer."""
        self._number += 1
        message = self.client.session.msg(
            "debug_request", {"type": "request", "seq": self._number, "command": command, "arguments": arguments}
        )
        self.client.control_channel.send(message)
        until = time.monotonic() + WAIT
        while time.monotonic() < until:
            reply = self.client.get_control_msg(timeout=WAIT)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                assert reply["content"].get("success", True), reply["content"]
                return reply["content"].get("body") or {}
        raise TimeoutError(command)

    def event(self, name: str) -> dict[str, Any]:
        """Wait for an event of the debugger."""
        until = time.monotonic() + WAIT
        while time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                message = self.client.get_iopub_msg(timeout=1)
                if message["msg_type"] == "debug_event" and message["content"]["event"] == name:
                    return message["content"]["body"]
        raise TimeoutError(name)

    def attach(self) -> None:
        """As JupyterLab does when its debugger is switched on."""
        self.debug(
            "initialize",
            clientID="test",
            adapterID="",
            linesStartAt1=True,
            columnsStartAt1=True,
            locale="en",
            pathFormat="path",
            supportsVariableType=True,
            supportsVariablePaging=True,
            supportsRunInTerminalRequest=True,
        )
        self.debug("attach")
        self.debug("configurationDone")

    def top(self, thread: int) -> tuple[dict[str, Any], dict[str, str]]:
        """The frame on top of the stack, and its locals by name."""
        frame = self.debug("stackTrace", threadId=thread)["stackFrames"][0]
        scopes = self.debug("scopes", frameId=frame["id"])["scopes"]
        found = self.debug("variables", variablesReference=scopes[0]["variablesReference"])["variables"]
        return frame, {variable["name"]: variable["value"] for variable in found}

    def value(self, frame: dict[str, Any], expression: str) -> str:
        return self.debug("evaluate", expression=expression, frameId=frame["id"])["result"]


@contextlib.contextmanager
def kernel(setup: str) -> Iterator[Kernel]:
    manager, client = start_new_kernel(kernel_name="python3", env=in_this_checkout(), startup_timeout=WAIT)
    try:
        started = Kernel(client)
        shown = started.run(setup)
        assert "Error" not in shown, shown
        yield started
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    if message["msg_type"] == "stream":
        return content["text"]
    if message["msg_type"] in ("execute_result", "display_data"):
        return content["data"]["text/plain"] + "\n"
    return "\n".join(content["traceback"]) if message["msg_type"] == "error" else ""
