"""A machine and what a run asks of it, as plain values. A part that is None is not known, or was not asked for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from nbdebug.tools.environment.tables import Version


def version(text: object) -> Version:
    """(2, 2, 2) of "2.2.2+cu121"; () of what is none."""
    match = re.match(r"\d+(?:\.\d+)*", str(text or ""))
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def dotted(numbers: Version) -> str:
    return ".".join(map(str, numbers))


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU. capability: (8, 6); memory: bytes."""

    name: str
    capability: Version = ()
    memory: int | None = None


@dataclasses.dataclass(frozen=True)
class EnvironmentFacts:
    """See `check_environment` for the form of the dict that it is made of. cards: all in the machine; build: torch's;
    driver: empty where none is loaded; pins: (requirement, what is installed) of each that is not met."""

    platform: str = ""
    python: Version = ()
    packages: Mapping[str, str] = dataclasses.field(default_factory=dict)
    build: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    cards: tuple[Card, ...] | None = None
    driver: Mapping[str, Any] | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    interfaces: tuple[str, ...] | None = None
    shm: int | None = None
    run: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pins: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, facts: Mapping[str, Any], pins: tuple[tuple[str, str], ...] = ()) -> EnvironmentFacts:
        """Raises TypeError where a part has another form."""
        try:
            packages, build, env, run = (dict(facts.get(part) or {}) for part in ("packages", "torch", "env", "run"))
            names = {str(name).lower().replace("_", "-"): str(value) for name, value in packages.items()}
            if build.get("version"):
                names.setdefault("torch", str(build["version"]))
            gpus = facts.get("gpus")
            known = [(str(c["name"]), tuple(map(int, c.get("capability") or ())), c.get("memory")) for c in gpus or ()]
            cards = None if gpus is None else tuple(Card(*card) for card in known)
            driver = dict(facts["driver"] or {}) if "driver" in facts else None
            variables = {str(name): str(value) for name, value in env.items()}
            interfaces = None if facts.get("interfaces") is None else tuple(map(str, facts["interfaces"]))
            system, python = str(facts.get("platform") or ""), version(facts.get("python"))
            shm = (facts.get("shm") or {}).get("size")
            return cls(system, python, names, build, cards, driver, variables, interfaces, shm, run, pins)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            wanted = "facts takes a dict as `python -m nbdebug facts` writes it"
            raise TypeError(f"{wanted}; a part has another form: {error}") from None

    def installed(self, package: str) -> Version:
        return version(self.packages.get(package))

    @property
    def torch(self) -> str:
        return str(self.build.get("version") or self.packages.get("torch") or "")

    @property
    def device(self) -> str:
        """ "cuda", "mps", "cpu", or "" where none was asked for."""
        return str(self.run.get("device") or "").partition(":")[0]

    @property
    def wants_cuda(self) -> bool:
        """Asked for, or nothing asked for on a machine with a card."""
        return self.device == "cuda" or not self.device and bool(self.cards)

    @property
    def is_cuda_build(self) -> bool:
        return bool(self.build.get("cuda")) and not self.build.get("hip")

    @property
    def index(self) -> int:
        """Of "cuda:1"."""
        number = str(self.run.get("device") or "").partition(":")[2]
        return int(number) if number.isdecimal() else 0

    @property
    def hiding(self) -> str | None:
        """The variable that chooses among the cards, where one is set."""
        names = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if self.build.get("hip") else ()
        return next((name for name in names or ("CUDA_VISIBLE_DEVICES",) if name in self.env), None)

    @property
    def visible(self) -> tuple[Card, ...]:
        """The cards that torch sees, in its order: the list ends at the first entry that is no card."""
        cards = list(self.cards or ())
        if self.env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            cards.sort(key=lambda card: card.capability, reverse=True)  # CUDA's own order: the fastest first
        if self.hiding is None:
            return tuple(cards)
        chosen: list[Card] = []
        entries = [entry.strip() for entry in self.env[self.hiding].split(",")]
        if len(set(entries)) < len(entries):
            return ()
        for entry in entries:
            if entry.lower().startswith(("gpu-", "mig-")):
                chosen += cards[len(chosen) : len(chosen) + 1]  # by its number of manufacture, which is not known here
            elif entry.isdecimal() and int(entry) < len(cards):
                chosen.append(cards[int(entry)])
            else:
                break
        return tuple(chosen)

    @property
    def processes(self) -> int:
        """Of this machine."""
        world, nodes = self.run.get("world_size") or 1, self.run.get("nodes") or 1
        return max(1, int(world) // max(1, int(nodes)))

    @property
    def used(self) -> tuple[Card, ...]:
        """The visible cards that the run computes on."""
        if self.processes > 1 or not self.device:
            return self.visible[: self.processes] if self.device else self.visible
        return self.visible[self.index : self.index + 1]

    @property
    def start_method(self) -> str:
        """Of the loader's workers: what was asked for, or Python's own way, which forks on Linux until 3.13."""
        forks = self.platform.startswith("linux") and self.python < (3, 14)
        return str(self.run.get("start_method") or ("fork" if forks else "another"))
