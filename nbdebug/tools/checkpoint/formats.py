"""Reads checkpoints without loading them: torch's zip and legacy files, plain pickles, safetensors, indices of shards,
folders of torch.distributed.checkpoint.

A pickle is a program. It runs here on a machine that has no functions: each class or function that it names becomes a
stand-in that records its name, so nothing of the file, of torch or of the user is called, and no tensor is allocated.
The bytes of tensors are read once, in pieces of 4 MiB: for the checksum that a zip holds of each, and for NaN.
"""

from __future__ import annotations

import io
import json
import math
import os
import pathlib
import pickle
import struct
import sys
import tempfile
import warnings
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import IO, Any

import torch
from safetensors.torch import load_file

from nbdebug.observe.variables import class_holders, module_spec
from nbdebug.text import listed, size
from nbdebug.tools.checkpoint.rules import SavedFile, SavedGlobal, SavedObject, SavedTensor, walk

PIECE = 1 << 22  # bytes that are read at a time
MOVED = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # modules in Python 2
HEADER = 100_000_000  # bytes of the longest header of a safetensors file, as the library has it
LEGACY = 0x1950A86A20F9469CFC6C  # what a torch file of before 1.6 begins with
SAFETENSORS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128, "UntypedStorage": torch.uint8,
}  # fmt: skip
METADATA = (
    "torch.distributed.checkpoint.metadata.", "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout", "pathlib.",
)  # fmt: skip
"""Beginnings of what the `.metadata` of torch.distributed.checkpoint names, besides torch's own list."""
HARMLESS = {
    f"builtins.{n}"
    for n in "set frozenset dict list tuple int float complex str bytes bytearray bool slice range object".split()
}
FOREIGN = {
    b"version https://git-lfs": "a pointer of Git LFS", b"<": "a page of HTML", b"{": "text (JSON)",
    b"\x1f\x8b": "a gzip archive", b"\x93NUMPY": "an array of NumPy", b"\x89HDF": "an HDF5 file",
    b"GGUF": "a GGUF file", b"7z\xbc\xaf": "a 7z archive", b"\xfd7zXZ": "an xz archive",
}  # fmt: skip
"""How files begin that are often taken for weights."""
TORN = (pickle.UnpicklingError, EOFError, zipfile.BadZipFile, struct.error, zlib.error)
SENSELESS = (ValueError, TypeError, LookupError, AttributeError, MemoryError, OverflowError, ImportError)
"""What reading raises of a file that ends early, and of one that was never good."""


def _made(name: str, args: tuple[Any, ...]) -> Any:
    if name in ("collections.OrderedDict", "collections.defaultdict", "collections.Counter", "builtins.dict"):
        return OrderedDict(args[0] if args and isinstance(args[0], (list, dict)) else ())  # it takes a `_metadata`
    if name == "copyreg._reconstructor" and args and isinstance(args[0], type):
        return SavedObject(args[0].__dict__["title"])
    if name in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state") and args:
        return args[0]
    if name in ("torch.Size", "builtins.tuple", "builtins.list", "builtins.set", "builtins.frozenset"):
        return tuple(args[0]) if args and isinstance(args[0], (tuple, list)) else ()
    if name.startswith("torch._utils._rebuild_tensor") and len(args) > 3 and isinstance(args[0], SavedTensor):
        whole, offset, shape, stride = args[:4]
        return SavedTensor(whole.dtype, tuple(shape), whole.storage, int(offset), tuple(stride), whole.location)
    if name == "torch._utils._rebuild_from_type_v2" and len(args) > 2 and isinstance(args[2], tuple):
        return _made(args[0].__dict__["title"], args[2]) if isinstance(args[0], type) else SavedObject(name)
    return SavedObject(name)


class _Reader(pickle.Unpickler):
    """Python's own machine, with stand-ins for all that a pickle names: a class in its tree is always one."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="latin1")
        self.names: dict[str, Any] = {}
        self.storages: dict[str, tuple[torch.dtype, int]] = {}

    def find_class(self, module: str, name: str) -> Any:
        title = f"{MOVED.get(module, module)}.{name}"
        if title not in self.names:
            self.names[title] = type(name, (), {"title": title, "__new__": lambda cls, *args: _made(title, args)})
        return self.names[title]

    def persistent_load(self, saved: Any) -> Any:
        """A storage: ("storage", its type, its key, its device, its number of elements)."""
        if not (isinstance(saved, tuple) and len(saved) > 4 and saved[0] == "storage"):
            return SavedObject("storage")
        kind = saved[1].__dict__["title"] if isinstance(saved[1], type) else ""
        dtype = STORAGES.get(kind.rpartition(".")[2], torch.uint8)
        self.storages[str(saved[2])] = (dtype, int(saved[4]))
        return SavedTensor(str(dtype).removeprefix("torch."), (int(saved[4]),), str(saved[2]), 0, (1,), str(saved[3]))


def read_file(path: pathlib.Path, values: bool = True) -> SavedFile:
    """What is in a file. values: whether the bytes of tensors are read too (checksums, NaN, zeros). Raises OSError
    where the file can't be read; anything wrong with its contents is its `fault`."""
    saved = SavedFile(str(path), path.stat().st_size)
    with open(path, "rb") as file:
        head = file.read(512)
        file.seek(0)
        saved.format, saved.begins = _format(head, path.name)
        if saved.bytes == 0:
            saved.begins, saved.fault = "", "it is empty (0 bytes)"
        elif not head.strip(b"\0"):
            saved.begins, saved.fault = "", "it begins with zeros: its space was reserved and never written"
        elif saved.format:
            try:
                _READERS[saved.format](file, saved, values)
            except TORN as error:
                saved.fault = f"it ends early, after {size(saved.bytes)} ({type(error).__name__}: {str(error)[:80]})"
            except SENSELESS as error:
                saved.fault = f"its contents make no sense ({type(error).__name__}: {str(error)[:80]})"
    return saved


def _format(head: bytes, name: str) -> tuple[str, str]:
    """(format, what it is instead), one of them "". A header of safetensors begins with its length, in 8 bytes."""
    known = next((words for start, words in FOREIGN.items() if head.lstrip().startswith(start)), "")
    if name == ".metadata":
        return "distributed", ""
    if head.startswith(b"PK\x03\x04"):
        return "zip", ""
    if "JSON" in known and name.endswith(".json"):
        return "index", ""
    short = int.from_bytes(head[:8], "little") < HEADER
    if head[8:9] == b"{" and short or name.endswith(".safetensors") and (short or not known):
        return "safetensors", ""
    if head[:1] == b"\x80":
        return "pickle", ""
    return "", known or ("text" if head.isascii() else "a file of no known format")


def _zip(file: IO[bytes], saved: SavedFile, values: bool) -> None:
    with zipfile.ZipFile(file) as archive:
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if "data.pkl" not in entries or "constants.pkl" in entries:
            other = f"an archive of other files ({listed(archive.namelist())})"
            saved.format, saved.begins = "", "a TorchScript program" if "data.pkl" in entries else other
            return
        with archive.open(entries["data.pkl"]) as pickled:
            reader = _Reader(pickled)
            saved.tree = reader.load()
        saved.globals = _globals(reader.names, saved.tree)
        views = _views(saved)
        for key, (dtype, number) in reader.storages.items():
            info = entries.get(f"data/{key}")
            if info is None or info.file_size < number * dtype.itemsize:
                saved.fault = f"the bytes of storage {key} are not all there"
            elif values and info.compress_type == zipfile.ZIP_STORED:
                file.seek(info.header_offset + 26)
                lengths = struct.unpack("<HH", file.read(4))
                file.seek(info.header_offset + 30 + sum(lengths))
                checksum = _examine(file, number, dtype, views.get(key, []))
                if checksum != info.CRC and number * dtype.itemsize == info.file_size:
                    names = listed([name for name, _ in views.get(key, [])] or [key])
                    saved.fault = f"the bytes of {names} changed after they were written (checksum)"


def _pickle(file: IO[bytes], saved: SavedFile, values: bool) -> None:
    first = _Reader(file)
    tree = first.load()
    if tree != LEGACY:
        saved.tree, saved.globals = tree, _globals(first.names, tree)
        return
    saved.format = "legacy"
    for _ in range(2):  # the version of the protocol, and sizes of C's types
        _Reader(file).load()
    reader = _Reader(file)
    saved.tree = reader.load()
    saved.globals, views = _globals(reader.names, saved.tree), _views(saved)
    for key in _Reader(file).load():
        dtype, number = reader.storages[str(key)]
        written = struct.unpack("<q", file.read(8))[0]
        end = file.tell() + written * dtype.itemsize
        if end > saved.bytes:
            raise EOFError(f"storage {key} needs {size(end - saved.bytes)} more")
        if values:
            _examine(file, number, dtype, views.get(str(key), []))
        file.seek(end)


def _safetensors(file: IO[bytes], saved: SavedFile, values: bool) -> None:
    length = int.from_bytes(file.read(8), "little")
    if length > min(HEADER, saved.bytes - 8):
        raise EOFError(f"its header of {size(length)} is not whole")
    header = json.loads(file.read(length))
    about = header.get("__metadata__", {})
    own = any(key.startswith("nbdebug") for key in about) and json.loads(about["nbdebug"])
    if own and int(about.pop("nbdebug_checksum")) != header_checksum(header):
        raise ValueError("its header changed after it was written (checksum)")
    header.pop("__metadata__", None)
    saved.tree = {}
    for name, about in header.items():
        dtype, (start, end) = SAFETENSORS.get(about["dtype"], torch.uint8), about["data_offsets"]
        if 8 + length + end > saved.bytes:
            raise EOFError(f"`{name}` needs {size(8 + length + end - saved.bytes)} more")
        tensor = SavedTensor(str(dtype).removeprefix("torch."), tuple(about["shape"]), name)
        if about["dtype"] in SAFETENSORS and math.prod(tensor.shape) * dtype.itemsize != end - start:
            raise ValueError(f"`{name}` of shape {tensor.shape} and {about['dtype']} doesn't have {end - start} bytes")
        saved.tree[name] = tensor
        if values:
            file.seek(8 + length + start)
            checksum = _examine(file, (end - start) // dtype.itemsize, dtype, [(name, tensor)])
            if own and own["checksums"][name] != checksum:
                saved.fault = f"the bytes of {name} changed after they were written (checksum)"
    if own:
        saved.tree = decoded(own["tree"], saved.tree)


def header_checksum(header: Mapping[str, Any]) -> int:
    """Of what `Checkpoints` writes before the tensors: a file's state, and each tensor's shape, dtype and place."""
    return zlib.crc32(json.dumps(header).encode())


def decoded(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """What `Checkpoints` has written as JSON, with its tensors in their places: see `checkpoints.encoded`."""
    if not isinstance(tree, dict):
        return tree
    ((kind, held),) = tree.items()
    if kind == "tensor":
        return tensors[held]
    if kind in ("dict", "Counter"):
        pairs = {key: decoded(value, tensors) for key, value in held}
        return pairs if kind == "dict" else Counter(pairs)
    values = [decoded(value, tensors) for value in held]
    return tuple(values) if kind == "tuple" else values


def _index(file: IO[bytes], saved: SavedFile, values: bool) -> None:
    """The shards that an index names, as one tree."""
    shards = json.load(file).get("weight_map")
    if not isinstance(shards, dict):
        saved.format, saved.begins = "", "text (JSON)"
        return
    saved.tree, folder = {}, pathlib.Path(saved.path).parent
    names = sorted({str(shard) for shard in shards.values()})
    saved.lost = tuple(name for name in names if not (folder / name).is_file())
    for name in names:
        if name not in saved.lost:
            shard = read_file(folder / name, values)
            saved.bytes += shard.bytes
            saved.fault = saved.fault or (f"{name}: {shard.fault}" if shard.fault else "")
            saved.globals += shard.globals
            saved.tree.update(shard.tree or {})
    absent = [name for name, shard in shards.items() if name not in saved.tree and shard not in saved.lost]
    if absent and not saved.fault:
        saved.fault = f"its index names {listed(absent)}, and no shard holds {'it' if len(absent) == 1 else 'them'}"


def _distributed(file: IO[bytes], saved: SavedFile, values: bool) -> None:
    """The `.metadata` of a folder of torch.distributed.checkpoint: what it holds, and in which file each piece lies."""
    reader, folder = _Reader(file), pathlib.Path(saved.path).parent
    held, lost = reader.load().state, set[str]()
    saved.tree, saved.globals = {}, _globals(reader.names, held, METADATA)
    paths = held.get("planner_data") or {}
    for name, about in held["state_dict_metadata"].items():
        kind = about.state["properties"].state[0].title.rpartition(".")[2] if about.state else None
        value = SavedTensor(kind, tuple(about.state["size"])) if kind else None
        _put(saved.tree, paths.get(name, (name,)), value)
    for index, place in held["storage_data"].items():
        name, about = index.state["fqn"], place.state
        part, start, length = folder / about["relative_path"], about["offset"], about["length"]
        if not part.is_file():
            lost.add(part.name)
        elif part.stat().st_size < start + length:
            saved.fault = f"{part.name} ends early: `{name}` needs {size(start + length - part.stat().st_size)} more"
        elif length <= 16 * PIECE and not about.get("transform_descriptors"):
            piece = SavedFile(name)
            with open(part, "rb") as whole:
                whole.seek(start)
                _zip(io.BytesIO(whole.read(length)), piece, values)
            saved.bytes, saved.globals = saved.bytes + length, saved.globals + piece.globals
            saved.fault = saved.fault or (f"{part.name}, `{name}`: {piece.fault}" if piece.fault else "")
            _put(saved.tree, paths.get(name, (name,)), piece.tree)
    saved.tree, saved.lost = _lists(saved.tree), tuple(sorted(lost))


def _put(tree: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    """Set a value in nested dicts, or note what a further piece of a tensor holds."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    before = tree.get(path[-1])
    if isinstance(before, SavedTensor) and isinstance(value, SavedTensor):
        before.nan, before.inf = (before.nan or 0) + (value.nan or 0), (before.inf or 0) + (value.inf or 0)
    else:
        tree[path[-1]] = value


def _lists(tree: Any) -> Any:
    """With an optimizer's groups as the lists that they were."""
    if not isinstance(tree, dict):
        return tree
    lists = {key: _lists(value) for key, value in tree.items()}
    return list(lists.values()) if lists and "params" in (lists.get(0) or ()) else lists


_READERS = {"distributed": _distributed, "zip": _zip, "pickle": _pickle, "safetensors": _safetensors, "index": _index}


def _views(saved: SavedFile) -> dict[str, list[tuple[str, SavedTensor]]]:
    """The tensors that lie in each storage."""
    views: dict[str, list[tuple[str, SavedTensor]]] = {}
    for path, tensor in saved.tensors():
        views.setdefault(tensor.storage, []).append((path, tensor))
    return views


def _examine(file: IO[bytes], number: int, dtype: torch.dtype, views: list[tuple[str, SavedTensor]]) -> int:
    """Read so many elements; note in the tensors that lie there what they hold. Gives the checksum of the bytes."""
    checksum, at = 0, 0
    for _, tensor in views:
        tensor.nan, tensor.inf, tensor.zero, tensor.mask = 0, 0, True, True
    buffer = bytearray(min(PIECE, number * dtype.itemsize))
    while at < number:
        wanted = min(len(buffer), (number - at) * dtype.itemsize)
        if file.readinto(memoryview(buffer)[:wanted]) < wanted:  # type: ignore[attr-defined]
            raise EOFError("unexpected end")
        checksum = zlib.crc32(memoryview(buffer)[:wanted], checksum)
        values = torch.frombuffer(buffer, dtype=dtype, count=wanted // dtype.itemsize)
        for _, tensor in views:
            first, length = tensor.offset - at, math.prod(tensor.shape)
            if length and len(tensor.stride) == len(tensor.shape):  # from its first element to its last
                length = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride))
            last = first + length
            if last > 0 and first < len(values):
                _note(tensor, values[max(first, 0) : last])
        at += len(values)
    return checksum


def _note(tensor: SavedTensor, values: torch.Tensor) -> None:
    if not values.dtype.is_floating_point:
        tensor.zero = tensor.zero and not bool(values.any()) if values.dtype != torch.bool else False
        return
    if values.dtype.itemsize == 1:
        values = values.float()
    low, high = (float(edge) for edge in torch.aminmax(values))
    tensor.zero = tensor.zero and low == high == 0
    if low - low == 0 and high - high == 0:
        tensor.mask = tensor.mask and low == high == 0
        return
    tensor.nan = (tensor.nan or 0) + int(values.isnan().sum())
    tensor.inf = (tensor.inf or 0) + int(values.isinf().sum())
    tensor.mask = tensor.mask and bool(((values == 0) | (values == float("-inf"))).all())


def _globals(names: Mapping[str, Any], tree: Any, also: tuple[str, ...] = ()) -> tuple[SavedGlobal, ...]:
    """allowed: by `weights_only=True`, torch's own list and the user's. also: beginnings of further names."""
    try:
        from torch._weights_only_unpickler import _get_allowed_globals, _get_user_allowed_globals

        allowed = {*_get_allowed_globals(), *_get_user_allowed_globals()}
    except ImportError:  # another version of torch: its private names may move
        allowed = {"collections.OrderedDict", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"}
    paths, found = dict[str, str](), []
    for path, value in walk(tree):
        if isinstance(value, (SavedObject, type)):
            paths.setdefault(value.name if isinstance(value, SavedObject) else value.__dict__["title"], path)
    for name in names:
        known = name in allowed or name in HARMLESS or bool(also) and name.startswith(also)
        known = known or name.startswith("torch.") and name.rpartition(".")[2] in STORAGES
        missing = "" if known else _missing(name)
        near = class_holders(name.rpartition(".")[2]) if missing else ()
        found.append(SavedGlobal(name, paths.get(name, ""), known, missing, next(iter(near), "")))
    return tuple(found)


def _missing(name: str) -> str:
    """ "module" or "name" where an object can't be imported under its name. Nothing is imported to find out."""
    module, _, last = name.rpartition(".")
    while module_spec(module) is None and "." in module and last[:1].isupper():
        module, _, last = module.rpartition(".")  # a class within a class
    if module not in sys.modules:
        return "" if module_spec(module) is not None else "module"
    held = sys.modules[module]
    return "" if last in vars(held) or hasattr(type(held), "__getattr__") else "name"


def loaded(path: pathlib.Path) -> Any:
    """The contents of a file (or index) with its tensors. For files whose names are all allowed."""
    if path.name == ".metadata":
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        with tempfile.NamedTemporaryFile() as whole, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            dcp_to_torch_save(path.parent, whole.name)
            return torch.load(whole.name, map_location="cpu", weights_only=True)
    if path.suffix == ".json":
        shards = sorted({*json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()})
        return {name: value for shard in shards for name, value in loaded(path.parent / shard).items()}
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def within(tree: Any, entry: str) -> Any:
    """The part of a file's contents that lies at a dotted path."""
    for part in entry.split(".") if entry else ():
        tree = tree[part]
    return tree


def is_checkpoint(path: pathlib.Path) -> bool:
    """Whether a file has an ending that checkpoints have, and is no temporary file."""
    return path.suffix in ENDINGS and not path.name.startswith(".") and os.path.isfile(path)


ENDINGS = {".pt", ".pth", ".ckpt", ".bin", ".tar", ".safetensors", ".pkl", ".chkpt", ".model", ".weights"}
