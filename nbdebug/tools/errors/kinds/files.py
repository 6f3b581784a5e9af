"""Files, and the modules and classes that an import or a pickle needs: which one is meant, what is there in its place,
and where it could be. Of a file the size and the first bytes are read, and nothing of it is shown."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import glob
import io
import itertools
import os
import pathlib
import pickletools
import pkgutil
import re
import stat
import sys
import types
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nbdebug.observe.frames import Frame
from nbdebug.observe.locations import source_text
from nbdebug.observe.sources import edit_of
from nbdebug.observe.variables import attributes, class_holders, module_spec
from nbdebug.report import Edit, Where
from nbdebug.tools.errors.context import (
    COPIED,
    ErrorContext,
    callee_name,
    calls_in,
    expression,
    kind_of_message,
    operands,
    path_text,
    statement,
    value_of,
)
from nbdebug.tools.errors.operands import raised_by_user
from nbdebug.tools.errors.rules import Raised, word_pairs
from nbdebug.tools.errors.rules.files import FileFacts, ModuleMissing

SURE = 0.6
"""How alike two names of files must be (difflib's ratio) to be shown side by side; nothing is changed by it."""
MOST = 2000
"""Entries of a folder that are compared."""
HEAD = 512
"""Bytes read at the start of a file."""
ROLES = "path filename file_path filepath path_or_buf filepath_or_buffer io fp f file stream fname name self".split()
"""Names under which libraries have the path or the open file, the surest first."""

IMAGE = re.compile(r"UnidentifiedImageError|cannot identify image file")
CUT_IMAGE = re.compile(
    r"image file is truncated|broken data stream when reading image|Truncated File Read|[Ii]mage is incomplete or "
    r"truncated|unrecognized data stream contents|broken PNG file|[Pp]remature end of (?:JPEG|data)"
)
SYNTAX = re.compile(
    r"^(?:JSONDecodeError|TOMLDecodeError|(?:Scanner|Parser|Composer|Constructor|Reader|MarkedYAML)Error)"
)
WEIGHTS = re.compile(r"[\\/]torch[\\/]serialization\.py$|[\\/]safetensors[\\/]|[\\/]pickle\.py$")
HUB = {
    "restricted": "GatedRepo|gated repo|is restricted|awaiting a review|must be authenticated",
    "offline": "couldn't connect to|[Oo]ffline ?mode|cannot find the requested files in the local cache|"
    "outgoing traffic has been disabled|find the requested files in the (?:disk )?cache|Couldn't reach",
    "repository": "is not a valid model identifier|Repository Not Found|RepositoryNotFound|EntryNotFound|"
    "Entry Not Found|does not appear to have a file named|Can't load (?:tokenizer|the model|the configuration|"
    r"config)|404 Client Error|Dataset '?[\w./-]+'? doesn't exist|HFValidationError",
}
REPOSITORY = re.compile(r"(?:huggingface\.co/(?:api/)?(?:models/|datasets/)?|['\"`]|^)([\w.-]+/[\w.-]+)(?=['\"`/ ]|$)")


def detect_missing(context: ErrorContext) -> FileFacts | None:
    """The facts of a file or repository that is not there; None of any other error."""
    message = f"{context.type}: {context.message}"
    if (what := kind_of_message(HUB, message)) is not None and "/" in message:
        named = REPOSITORY.search(context.message)
        return FileFacts(_without_phase(context), what, named[1] if named else "")
    if context.type != "FileNotFoundError":
        return None
    path = _path_of(context) or _quoted(context.message)
    if not path:
        return None
    facts = FileFacts(_without_phase(context), "missing", path, item=_item_of(context))
    copied = context.carried is not None and context.carried.where == COPIED  # perhaps on another machine
    return facts if copied else _placed(facts)


def detect_syntax(context: ErrorContext) -> FileFacts | None:
    """The facts of a text that a parser of JSON, YAML or TOML refuses; None of any other error."""
    kind = context.type
    if not SYNTAX.match(kind) or raised_by_user(context):
        return None
    facts = FileFacts(_without_phase(context), "syntax", _path_of(context), "JSON", item=_item_of(context))
    own = attributes(context.error) if context.carried is None else {}
    place = re.search(r"line (\d+),? column (\d+)", context.message)
    line, column = (int(place[1]), int(place[2])) if place else (None, None)
    if kind == "JSONDecodeError":
        text = own.get("doc")
        reason = re.sub(r": line \d+ column.*", "", context.message.partition("\n")[0])
        facts = _read(facts) if facts.path else facts
        empty = isinstance(text, (str, bytes)) and not text.strip()
        return dataclasses.replace(
            facts, line=line, column=column, reason=reason, bytes=0 if empty else facts.bytes or None
        )
    if kind == "TOMLDecodeError":
        reason = re.sub(r" \(at line.*", "", context.message)
        return dataclasses.replace(facts, format="TOML", line=line, column=column, reason=reason)
    mark, problem = own.get("problem_mark"), own.get("problem")
    around = own.get("context")
    if problem is None and place and "yaml" in f"{context.message} {facts.path}".lower():  # known as text alone
        reason = re.split(r"\s+in \"", context.message)[0]
        file = re.search(r'in "([^"<]+)"', context.message)
        path = facts.path or (file[1] if file else "")
        return dataclasses.replace(facts, format="YAML", path=path, line=line, column=column, reason=reason)
    if type(problem) is not str:
        return None
    places = attributes(mark) if mark is not None else {}
    line, column = places.get("line"), places.get("column")
    file = places.get("name")
    if not facts.path and type(file) is str and not file.startswith("<"):
        facts = dataclasses.replace(facts, path=file)
    return dataclasses.replace(
        facts,
        format="YAML",
        line=line + 1 if type(line) is int else None,
        column=column + 1 if type(column) is int else None,
        reason=problem,
        around=around if type(around) is str else "",
    )


def weights_path(error: BaseException, names: Mapping[str, Any]) -> tuple[str, Where]:
    """The file that torch, pickle or safetensors could not read as weights, or that is not there, and the user's line;
    "" for any other error."""
    context = ErrorContext.of(error, names)
    read = any(WEIGHTS.search(frame.site.file) for frame in context.trail) or context.type == "SafetensorError"
    path = _path_of(context) if read or context.type == "FileNotFoundError" and context.carried is None else ""
    return path, _without_phase(context).where


def detect_image(context: ErrorContext) -> FileFacts | None:
    """The facts of a file that does not open as an image; None of others."""
    if not IMAGE.search(f"{context.type}: {context.message}"):
        return None
    raised = _without_phase(context)
    return _read(FileFacts(raised, "image", _path_of(context) or _quoted(context.message), item=_item_of(context)))


def detect_cut_image(context: ErrorContext) -> FileFacts | None:
    """The facts of an image whose pixels end early; None of others."""
    if not CUT_IMAGE.search(context.message) or raised_by_user(context):
        return None
    return _read(FileFacts(_without_phase(context), "image", _path_of(context), item=_item_of(context)))


def _without_phase(context: ErrorContext) -> Raised:
    """The exception; no phase: what is at fault lies on the disk."""
    raised = context.raised()
    return dataclasses.replace(
        raised, where=dataclasses.replace(raised.where, phase=None, module=None, module_type=None)
    )


# -- which file ------------------------------------------------------------------------------------------------------


def _path_of(context: ErrorContext) -> str:
    """The file that failed: as the exception has it, as the libraries' frames have it, or the user's line."""
    slot: Any = OSError.__dict__["filename"]
    own = slot.__get__(context.error) if issubclass(type(context.error), OSError) and context.carried is None else None
    if path_text(own):
        return path_text(own)
    below = list(itertools.takewhile(lambda frame: not frame.users, reversed(context.trail)))
    paths = (path for frame in reversed(below) for path in _paths_in(frame))  # what the user's line called comes first
    return next(paths, "") or _users_path(context)


def _users_path(context: ErrorContext) -> str:
    """The path in the user's failing line, or an open file among the variables there."""
    for frame in context.users[:3]:
        for _, value in operands(frame, whole=True):
            if path_text(value):
                return path_text(value)
        if frame.where.text and (match := re.search(r"""['"]([^'"]+\.\w{1,12})['"]""", frame.where.text)):
            return match[1]
        for value in frame.names.values():
            if type(value) is not str and path_text(value):
                return path_text(value)
    return ""


def _paths_in(frame: Frame) -> Iterator[str]:
    for role in ROLES:
        value = frame.names.get(role)
        if path_text(value):
            yield path_text(value)
        elif role == "self" and value is not None:
            inside = attributes(value)
            yield from filter(
                None, (path_text(inside.get(name)) for name in ("filename", "fp", "file", "path", "name"))
            )


def _quoted(message: str) -> str:
    match = re.search(r"""['"]([^'"\n]+)['"]""", message)
    return match[1] if match and path_text(match[1]) else ""


INDICES = ("index", "idx", "i", "item", "key", "n")


def _item_of(context: ErrorContext) -> int | None:
    """The index that a data set's `__getitem__` was asked for."""
    for frame in reversed(context.trail):
        if frame.site.function == "__getitem__":
            value = next((frame.names[name] for name in INDICES if type(frame.names.get(name)) is int), None)
            if value is not None:
                return int(value)
    return None


# -- what is there ---------------------------------------------------------------------------------------------------

MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "lfs"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG", "PNG"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
)


def _read(facts: FileFacts) -> FileFacts:
    """The size of a file, and what its first bytes are."""
    try:
        about = os.stat(facts.path)
        if not facts.path or not stat.S_ISREG(about.st_mode):
            return facts
        with open(facts.path, "rb") as file:
            head = file.read(HEAD)
    except (OSError, ValueError):
        return facts
    return dataclasses.replace(facts, bytes=about.st_size, begins=_kind_of(head))


def _kind_of(head: bytes) -> str:
    for magic, kind in MAGIC:
        if head.startswith(magic):
            return kind
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WebP"
    if head and not head.strip(b"\0"):
        return "zeros"
    if re.match(rb"\s*<(!doctype|html|\?xml|head)", head, re.IGNORECASE):
        return "html"
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError:
        return ""
    return "text" if text.strip() and all(c.isprintable() or c in "\r\n\t" for c in text) else ""


def _placed(facts: FileFacts) -> FileFacts:
    """With the folder on the way that exists, and what in it is nearly the missing name."""
    path = facts.path
    whole = os.path.abspath(path)
    folder, lacks = os.path.split(whole)
    while folder != os.path.dirname(folder) and not os.path.isdir(folder):
        folder, part = os.path.split(folder)
        lacks = f"{part}/{lacks}"
    first = lacks.partition("/")[0]
    try:
        names = sorted(os.listdir(folder))[:MOST]
    except OSError:
        names = []
    near = [name for name in names if name != first and name.lower().strip() == first.lower().strip()]
    near += [n for n in difflib.get_close_matches(first, names, 3, SURE) if n not in near]
    return dataclasses.replace(
        facts,
        folder=folder,
        lacks=lacks,
        near=tuple(near[:2]) if "/" not in lacks else tuple(f"{n}" for n in near[:1]),
        elsewhere=tuple(_elsewhere(path)) if not os.path.isabs(path) else (),
        relative=not os.path.isabs(path),
    )


def _elsewhere(path: str) -> Iterator[str]:
    """The same relative path below the folders above the working folder, and in the folders within it."""
    above = pathlib.Path.cwd()
    for level in range(1, 4):
        above = above.parent
        if (above / path).exists():
            yield os.path.join(*[os.pardir] * level, path)
    try:
        folders = [entry.name for entry in os.scandir() if entry.is_dir() and not entry.name.startswith(".")][:200]
    except OSError:
        return
    yield from (os.path.join(name, path) for name in sorted(folders) if os.path.exists(os.path.join(name, path)))


# -- modules and classes -----------------------------------------------------------------------------------------------


FOLDERS = 400
"""Folders that are searched."""
DEPTH = 3
SKIPPED = frozenset({"node_modules", "__pycache__", "site-packages", "dist-packages", "build", "dist"})
PIP = word_pairs(
    "cv2:opencv-python PIL:Pillow sklearn:scikit-learn skimage:scikit-image yaml:PyYAML bs4:beautifulsoup4 "
    "Crypto:pycryptodome dotenv:python-dotenv attr:attrs dateutil:python-dateutil fitz:PyMuPDF serial:pyserial "
    "usb:pyusb jwt:PyJWT git:GitPython magic:python-magic docx:python-docx pptx:python-pptx "
    "Levenshtein:python-Levenshtein umap:umap-learn hydra:hydra-core pytorch_lightning:lightning faiss:faiss-cpu "
    "google.protobuf:protobuf tensorboardX:tensorboardX clip:open_clip_torch segment_anything:segment-anything "
    "sentence_transformers:sentence-transformers torch_geometric:torch-geometric albumentations:albumentations "
    "pycocotools:pycocotools"
)
"""Modules of training code whose package has another name."""

WELL_KNOWN = (
    *PIP,
    *(
        "accelerate bitsandbytes catboost datasets deepspeed diffusers einops evaluate fastai gradio huggingface_hub "
        "jax keras lightgbm lightning matplotlib monai networkx nltk numba numpy onnx onnxruntime openai optuna "
        "pandas peft plotly polars pyarrow pydantic requests safetensors scipy seaborn sentencepiece spacy streamlit "
        "sympy tensorboard tensorflow timm tokenizers torch torchaudio torchmetrics torchtext torchvision tqdm "
        "transformers triton trl ultralytics wandb xformers xgboost"
    ).split(),
)
"""Modules of training code, to recognize a misspelt name: a package with the misspelt name may be malicious."""


def package_of(module: str) -> str:
    """Its package on PyPI, where that is known to have another name; else ""."""
    top = module.partition(".")[0]
    package = PIP.get(module) or PIP.get(top, "")
    return package if package.replace("-", "_").lower() != top.lower() else ""


def files_of(module: str, beside: Iterable[str]) -> tuple[tuple[str, ...], str]:
    """(files or packages of this name near the working folder; the folder to import the nearest from)."""
    parts = module.split(".")
    matches: list[tuple[str, str]] = []
    for folder in _folders([os.getcwd(), *beside]):
        path = os.path.join(folder, *parts)
        if os.path.isfile(path + ".py") or os.path.isfile(os.path.join(path, "__init__.py")):
            matches.append((path + ".py" if os.path.isfile(path + ".py") else path, folder))
    files = tuple(_relative(path) for path, _ in matches[:3])
    return files, _relative(matches[0][1]) if matches else ""


def project_of(top: str, folder: str) -> str:
    """The folder of a pyproject.toml or setup.py that packages what lies in `folder`, or in its `src`; "" for none. A
    file beside packages is left out by setuptools, so it must be a package there."""
    inside = os.path.basename(os.path.abspath(folder)) == "src"
    root = os.path.dirname(os.path.abspath(folder)) if inside else folder
    if top == "src" or not inside and not os.path.isfile(os.path.join(folder, top, "__init__.py")):
        return ""
    if os.path.isfile(os.path.join(root, "setup.py")):
        return _relative(root)
    with contextlib.suppress(OSError, UnicodeDecodeError), open(os.path.join(root, "pyproject.toml")) as file:
        if re.search(r"^\[(project|build-system|tool\.poetry)\]", file.read(), re.MULTILINE):
            return _relative(root)
    return ""


def _folders(starts: Iterable[str]) -> Iterator[str]:
    """Folders nearby: each start, its subfolders, then its parents and their subfolders."""
    visited: set[str] = set()
    todo = [(start, DEPTH) for start in dict.fromkeys(starts)]
    for start, _ in list(todo):
        parent = os.path.dirname(start)
        todo += [(parent, 1), (os.path.dirname(parent), 0)]
    while todo and len(visited) < FOLDERS:
        folder, depth = todo.pop(0)
        if folder in visited or not folder:
            continue
        visited.add(folder)
        yield folder
        if depth:
            todo += [(path, depth - 1) for path in _inside(folder)]


def _inside(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(
                e.path
                for e in entries
                if e.name not in SKIPPED and not e.name.startswith(".") and e.is_dir(follow_symlinks=False)
            )[:FOLDERS]
    except OSError:
        return []


def _relative(path: str) -> str:
    near = os.path.relpath(path)
    return path if near.count("..") > 2 else near


def importable() -> set[str]:
    """The top-level names that could be imported."""
    names = {*sys.stdlib_module_names, *(name.partition(".")[0] for name in sys.modules)}
    for folder in sys.path:
        try:
            with os.scandir(folder or ".") as entries:
                names |= {
                    e.name.partition(".")[0]
                    for e in entries
                    if e.name.endswith(".py") or (e.is_dir() and "." not in e.name and "-" not in e.name)
                }
        except OSError:  # a zip file, or a folder that no longer exists
            continue
    return names


def other_environments(top: str) -> str:
    """The interpreter of another environment on the PATH that has this module; "" where there is none."""
    mine = os.path.realpath(sys.prefix)
    for folder in os.environ.get("PATH", "").split(os.pathsep)[:40]:
        prefix = os.path.dirname(os.path.realpath(folder)) if folder else ""
        if not prefix or prefix == mine or not os.path.exists(os.path.join(folder, "python3")):
            continue
        for site in glob.glob(os.path.join(prefix, "lib", "python3*", "*-packages")):
            if os.path.isdir(os.path.join(site, top)) or os.path.isfile(os.path.join(site, top + ".py")):
                return os.path.join(folder, "python3")
    return ""


MODULE = re.compile(r"No module named '?([\w.]+)'?(?:; '([\w.]+)' is not a package)?")
NAME = re.compile(r"cannot import name '(\w+)' from (partially initialized module )?'?([\w.]+)'?(?: \((.*?)\))?")
PARTIAL = re.compile(r"partially initialized module '([\w.]+)'.*has no attribute '(\w+)'")
RELATIVE = re.compile(r"attempted relative import (?:with no known parent package|beyond top-level package)")
CLASS = re.compile(r"Can't get attribute '([\w.]+)' on <module '([\w.]+)'|module '([\w.]+)' has no attribute '(\w+)'")
REFUSED = re.compile(r"Unsupported (?:global|class)[^:]*: GLOBAL ([\w.]+)\.(\w+) was not an allowed global")
LOADS = re.compile(r"[\\/]torch[\\/](serialization|_weights_only_unpickler)\.py$|[\\/]pickle\.py$")
NEAR = 0.8
"""How similar (difflib's ratio) a name must be to be offered: one letter in five may differ. Our choice."""


def detect_module(context: ErrorContext) -> ModuleMissing | None:
    facts = _absent(context)
    if facts is None or not facts.pickled or facts.module == "__main__" or context.type == "UnpicklingError":
        return facts
    edit, complete = _alias(context, facts.module, facts.holders)
    return dataclasses.replace(facts, edit=edit, complete=complete)


def _absent(context: ErrorContext) -> ModuleMissing | None:
    message, kind = context.message, context.type
    if kind in ("ModuleNotFoundError", "ImportError") and (match := MODULE.search(message)):
        return _missing(context, match[1], match[2])
    if kind == "ImportError" and (match := NAME.search(message)):
        return _name(context, match[3], match[1], bool(match[2]))
    if kind == "ImportError" and RELATIVE.search(message):
        lines = [node for frame in context.users if isinstance(node := expression(frame), ast.ImportFrom)]
        names = ["." * node.level + (node.module or "") for node in lines]
        return ModuleMissing(context.raised(), "relative", "".join(names[:1]), python=_python())
    if kind == "UnpicklingError" and (match := REFUSED.search(message)) and module_spec(match[1]) is None:
        source = _source(context)
        return dataclasses.replace(
            _missing(context, match[1], None),
            name=match[2],
            pickled=True,
            source=source,
            holders=class_holders(match[2]),
        )
    if kind == "AttributeError" and (match := PARTIAL.search(message)):
        return ModuleMissing(context.raised(), "circular", match[1], match[2], python=_python())
    if kind == "AttributeError" and (match := CLASS.search(message)) and (match[1] or _unpickling(context)):
        module, name = (match[2], match[1]) if match[1] else (match[3], match[4])
        if not _unpickling(context) and context.carried is None and not _loading(context):
            return None
        near = _near_names(name, vars(sys.modules[module]) if module in sys.modules else ())
        return ModuleMissing(
            context.raised(),
            "class",
            module,
            name,
            True,
            _source(context),
            class_holders(name),
            near=near,
            python=_python(),
        )
    return None


def _missing(context: ErrorContext, module: str, blocker: str | None) -> ModuleMissing:
    request = _pickle_request(context)
    name = request[1] if request and request[0] == module else ""
    files, folder = files_of(module, _beside(context))
    top = module.partition(".")[0]
    if not blocker and not request and not files and (inside := _submodule(module)) is not None:
        parent, name, near = inside
        raised, taken_by, needed_by = context.raised(), _file_of(parent), _asking_library(context)
        return ModuleMissing(
            raised, "submodule", module, name, near=near, taken_by=taken_by, python=_python(), needed_by=needed_by
        )
    return ModuleMissing(
        context.raised(),
        "not a package" if blocker else "module",
        module,
        name,
        bool(request),
        _source(context) if request else "",
        class_holders(name) if name else (),
        files,
        folder,
        () if files else _near_names(top, importable()),
        package_of(module),
        other_environments(top),
        _file_of(blocker) if blocker else "",
        _python(),
        _asking_library(context),
        next(iter(() if top in WELL_KNOWN else _near_names(top, WELL_KNOWN)), ""),
        project_of(top, folder) if files else "",
    )


def _submodule(module: str) -> tuple[str, str, tuple[str, ...]] | None:
    """(package, its object of this name that is not a module, modules with similar names), where the package itself was
    imported and lacks the module."""
    parent, _, last = module.rpartition(".")
    space = vars(sys.modules[parent]) if parent in sys.modules else {}
    if space.get("__file__") is None or package_of(module) == PIP.get(module, "-"):
        return None  # a namespace, whose parts are installed one by one
    path = space.get("__path__")  # none of its modules is imported
    near = _near_names(last, {module.name for module in pkgutil.iter_modules(path)} if type(path) is list else ())
    alike = [
        name
        for name in list(sys.modules)
        if name.startswith(f"{parent.partition('.')[0]}.") and name.rpartition(".")[2] == last and name != module
    ]
    return parent, last if last in space else "", (*(f"{parent}.{name}" for name in near), *sorted(alike, key=len)[:1])


def _name(context: ErrorContext, module: str, name: str, partial: bool) -> ModuleMissing:
    there = sys.modules.get(module)
    what = "circular" if partial else "name"
    near = _near_names(name, vars(there)) if there is not None else ()
    return ModuleMissing(context.raised(), what, module, name, near=near, taken_by=_file_of(module), python=_python())


def _python() -> str:
    return f"{os.path.basename(sys.executable)} {sys.version_info.major}.{sys.version_info.minor}"


def _pickle_request(context: ErrorContext) -> tuple[str, str] | None:
    """(module, class) that an unpickler needs; ("", "") where they are not known; None where no unpickler runs."""
    for frame in reversed(context.trail):
        if frame.site.function == "find_class" and LOADS.search(frame.site.file):
            module = frame.names.get("mod_name", frame.names.get("module"))
            name = frame.names.get("name")
            return (module, name) if type(module) is str and type(name) is str else None
    return ("", "") if _unpickling(context) or _loading(context) else None


def _unpickling(context: ErrorContext) -> bool:
    return any(LOADS.search(frame.site.file) for frame in context.trail)


def _loading(context: ErrorContext) -> bool:
    """Whether the innermost line is a call of `load` or `loads`, whose C code leaves no frame."""
    inner = [frame for frame in context.trail if "importlib" not in frame.site.file][-1:]
    return bool(inner and re.search(r"\bload(s|_build)?\(", source_text(inner[0].site) or ""))


def _load_call(context: ErrorContext) -> ast.Call | None:
    calls = (call for frame in context.users for call in calls_in(expression(frame)))
    return next((call for call in calls if callee_name(call) in ("load", "loads", "read_pickle")), None)


def _source(context: ErrorContext) -> str:
    """The call that loads, as the user wrote it."""
    call = _load_call(context)
    return ast.unparse(call) if call is not None else ""


def _asking_library(context: ErrorContext) -> str:
    """The installed package that needs the module, where the user's own line imports that one."""
    asker = next((frame for frame in reversed(context.trail) if "importlib" not in frame.site.file), None)
    if asker is None or asker.users:
        return ""
    name = str(asker.globals.get("__name__", "")).partition(".")[0]
    return "" if name == "__main__" else name


def _file_of(module: str) -> str:
    space = vars(sys.modules[module]) if module in sys.modules else {}
    file = space.get("__file__")
    return os.path.relpath(file) if type(file) is str and file.startswith(os.getcwd()) else file or ""


def _beside(context: ErrorContext) -> Iterator[str]:
    """The folders of the user's own files in the traceback."""
    for frame in context.users:
        folder = os.path.dirname(frame.site.file)
        if folder and os.path.isdir(folder):
            yield folder


def _near_names(missing: str, there: Any) -> tuple[str, ...]:
    names = [name for name in there if type(name) is str and name != missing and not name.startswith("_")]
    return tuple(difflib.get_close_matches(missing, names, n=2, cutoff=NEAR))


# -- an old name for a module ------------------------------------------------------------------------------------------

PICKLE = 20_000_000
"""Bytes of the part of a file that is read for the names of its classes."""


def _alias(context: ErrorContext, module: str, holders: tuple[str, ...]) -> tuple[Edit | None, int]:
    """(the failing line behind one that gives a module its old name, how many classes the file names; 0 where not all
    are then found). The file is read, and not loaded."""
    frame = context.frame
    line, call = (statement(frame), _load_call(context)) if frame is not None else (None, None)
    holder = next((name for name in holders if name not in (module, "__main__")), "")
    if frame is None or line is None or hasattr(line, "body") or call is None or not call.args or not holder:
        return None, 0
    known = {name for name in ("sys", holder) if type(frame.globals.get(name)) is types.ModuleType}
    wanted = [name for name in ("sys", holder.partition(".")[0]) if name not in known]
    text = f"import {', '.join(wanted)}\n" if wanted else ""
    text += f"sys.modules[{module!r}] = {holder}\n"
    edit = edit_of(frame.site.file, {line: text.replace("\n", "\n" + " " * line.col_offset) + "{raw}"})
    names = _classes_in(value_of(call.args[0], frame))
    found = bool(names) and all(
        name in vars(sys.modules[holder]) if home == module else home.partition(".")[0] in (*sys.modules, "__builtin__")
        for home, name in names
    )
    return edit, len(names) if found else 0


def _classes_in(file: Any) -> set[tuple[str, str]]:
    """(module, name) of the classes and functions that a file of `torch.save` needs."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(file.getvalue()) if type(file) is io.BytesIO else path_text(file) or "")
        inside = next(info for info in archive.infolist() if info.filename.endswith("data.pkl"))
        if inside.file_size > PICKLE:
            return set()
        words = [
            str(value).split(" ", 1) for op, value, _ in pickletools.genops(archive.read(inside)) if op.name == "GLOBAL"
        ]
    except Exception:  # another kind of file, or a torn one
        return set()
    return {(home, name) for home, name in words}
