"""A real JupyterLab for tests: one server, notebooks opened in chromium, cells run, controls found by their roles.

    book = lab.open(["%load_ext nbdebug", "1 + 1"])     a notebook with these cells, in a tab, its kernel ready
    book.run_all(); book.wait_idle()                    as the Run menu does
    book.output(1).get_by_role("button", name="Pause").click()
    book.theme("dark"); book.screenshot(path); book.save()
    again = lab.copy(book, trusted=False)               the saved file, with a new kernel, as someone else gets it

Nothing of the user's own settings is read or written, and nothing outside this machine is asked for.
"""

from __future__ import annotations

import json
import os
import pathlib
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

import nbformat

from tests.shell import in_this_checkout

KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
"""Without it JupyterLab asks for a kernel, and waits."""
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
EXTENSIONS = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}


class Lab:
    """A server in `folder`, and a browser's tabs on it."""

    def __init__(self, folder: pathlib.Path, browser: Any):
        self.folder, self.browser = folder, browser
        self.files, self.token, self._count = folder / "files", secrets.token_hex(16), 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.files.mkdir(parents=True)
        self._server = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        own = {
            f"{name}_DIR": str(self.folder / name.lower())
            for name in (
                "JUPYTER_CONFIG",
                "JUPYTER_DATA",
                "JUPYTER_RUNTIME",
                "JUPYTERLAB_SETTINGS",
                "JUPYTERLAB_WORKSPACES",
            )
        }
        config = self.folder / "jupyter_config" / "labconfig"
        config.mkdir(parents=True)
        (config / "page_config.json").write_text(json.dumps(EXTENSIONS))
        settings = {
            "IdentityProvider.token": self.token,
            "ServerApp.open_browser": False,
            "ServerApp.port_retries": 0,
            "ServerApp.port": int(self.address.rpartition(":")[2]),
            "ServerApp.root_dir": str(self.files),
            "ServerApp.allow_root": True,
            "LabApp.expose_app_in_browser": True,
            "LabApp.news_url": None,
            "YDocExtension.disable_rtc": True,
        }
        log = (self.folder / "server.log").open("wb")
        return subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *(f"--{name}={value}" for name, value in settings.items())],
            env={
                **in_this_checkout(),
                **own,
                "IPYTHONDIR": str(self.folder / "ipython"),
                "JUPYTER_PREFER_ENV_PATH": "1",
            },
            cwd=self.files,
            stdout=log,
            stderr=log,
        )

    def ask(self, path: str, method: str = "GET") -> Any:
        """The server's REST interface. Raises OSError while it does not answer."""
        request = urllib.request.Request(
            self.address + path, method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read() or "null")

    def wait_ready(self, seconds: float = 60) -> None:
        def answers() -> bool:
            assert self._server.poll() is None, (self.folder / "server.log").read_text()[-2000:]
            try:
                return bool(self.ask("/api/status"))
            except OSError:
                return False

        until(answers, seconds, "JupyterLab does not answer")

    def open(self, cells: Sequence[str], name: str = "") -> Book:
        """A new notebook with these code cells, in a tab of its own."""
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata=KERNEL)
        return self._open(book, name)

    def copy(self, book: Book, trusted: bool = True) -> Book:
        """The saved file under another name, to be looked at (its new kernel is not waited for); not trusted: as if it
        came from someone else."""
        saved = book.saved()
        if not trusted:
            saved.metadata["from"] = "elsewhere"  # another signature than the one that this server has noted
        return self._open(saved, book.path.stem, ready=False)

    def _open(self, book: Any, name: str, ready: bool = True) -> Book:
        self._count += 1
        path = self.files / f"{name or 'notebook'}-{self._count}.ipynb"
        nbformat.write(book, path)
        return Book(self, path, ready)

    def close(self) -> None:
        self._server.terminate()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()


class Book:
    """A notebook in a tab. page: playwright's; alarms: errors that the page has raised."""

    def __init__(self, lab: Lab, path: pathlib.Path, ready: bool):
        self.lab, self.path = lab, path
        self.page = lab.browser.new_page(viewport={"width": 1100, "height": 1000})
        self.alarms: list[str] = []
        self.page.on("pageerror", lambda error: self.alarms.append(str(error)))
        self.page.goto(f"{lab.address}/lab/workspaces/w{path.stem}/tree/{path.name}?token={lab.token}&reset")
        self.page.wait_for_selector(".jp-NotebookPanel .jp-CodeCell", timeout=60_000)
        if ready:
            self.wait_idle()

    def session(self) -> Any:
        """What the server knows of this notebook's kernel; None while it has none."""
        return next((s for s in self.lab.ask("/api/sessions") if s["path"] == self.path.name), None)

    def wait_idle(self, seconds: float = 60) -> None:
        """Until the kernel is there, connected, and has nothing to do. The toolbar says so too early."""

        def idle() -> bool:
            kernel = (self.session() or {}).get("kernel") or {}
            ready = kernel.get("connections", 0) > 0 and kernel.get("execution_state") == "idle"
            return ready and not self.page.evaluate(
                "[...document.querySelectorAll('.jp-InputPrompt')].some(e => e.textContent.includes('*'))"
            )

        until(idle, seconds, f"the kernel of {self.path.name} is not idle")

    def command(self, name: str, **arguments: Any) -> None:
        """Something that the menus can do, such as "notebook:run-all-cells"."""
        self.page.evaluate(
            "([name, arguments]) => window.jupyterapp.commands.execute(name, arguments)", [name, arguments]
        )

    def run_all(self, wait: bool = True) -> None:
        self.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")
        if wait:
            self.page.wait_for_function("document.querySelector('.jp-InputPrompt')?.textContent.trim() !== '[ ]:'")
            self.wait_idle()

    def append(self, text: str) -> None:
        """A new cell at the end, with this code, and run."""
        cells = self.page.locator(".jp-Notebook .jp-Cell")
        cells.last.locator(".jp-InputArea-prompt").click()
        self.command("notebook:insert-cell-below")
        self.command("notebook:replace-selection", text=text)
        self.command("notebook:run-cell")
        self.page.wait_for_timeout(300)

    def cell(self, place: int) -> Any:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(place)

    def output(self, place: int) -> Any:
        """The outputs of a cell, counted from 0."""
        return self.cell(place).locator(".jp-Cell-outputArea")

    def theme(self, name: str) -> None:
        """ "light" or "dark"."""
        self.command("apputils:change-theme", theme=THEMES[name])
        light = "true" if name == "light" else "false"
        self.page.wait_for_selector(f"body[data-jp-theme-light={light}]", state="attached")  # a body is never "visible"

    def screenshot(self, path: str | os.PathLike[str], place: int | None = None) -> None:
        """Of the page, or of one cell."""
        (self.page if place is None else self.cell(place)).screenshot(path=str(path))

    def save(self) -> Any:
        """Save, and give what the file holds."""
        self.command("docmanager:save")
        return self.saved()

    def saved(self) -> Any:
        return nbformat.read(self.path, as_version=4)

    def close(self) -> None:
        """Close the tab and end the kernel."""
        session = self.session()
        self.page.close()
        if session is not None:
            self.lab.ask(f"/api/sessions/{session['id']}", "DELETE")


def until(is_so: Callable[[], bool], seconds: float, otherwise: str) -> None:
    """Wait, and fail with a word after too long."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"{otherwise}, after {seconds:g} seconds"
        time.sleep(0.1)
