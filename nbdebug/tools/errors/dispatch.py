"""The cause of an exception: the first kind of error that recognizes it names it; else the facts of its frames, no
guess."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from nbdebug.observe.frames import Owners
from nbdebug.observe.variables import named_parameters
from nbdebug.report import Finding, Link, Report
from nbdebug.text import clip
from nbdebug.tools.errors.context import ErrorContext
from nbdebug.tools.errors.exceptions import Candidate, candidate_chains, exceptions_of_text, with_remote_frames
from nbdebug.tools.errors.unknown import report_of
from nbdebug.tools.errors.values import message_of


@dataclasses.dataclass(frozen=True)
class ErrorKind:
    """One kind of error. detect, rule: "module.function" in this folder; the first gives the facts of an exception, or
    None where it is of another kind.

    words, files: patterns of the exception's type and message, and of a file in its traceback. Where either matches
    nothing, the exception is of another kind, and the module of `detect` is not even imported. Words are wider than the
    patterns of `detect` itself (tests/error/test_dispatch.py).
    """

    detect: str
    rule: str
    words: str = ""
    files: str = ""

    def may_apply(self, context: ErrorContext) -> bool:
        return re.search(self.words, f"{context.type}: {context.message}", re.IGNORECASE) is not None and any(
            re.search(self.files, file) for file in ("", *(frame.site.file for frame in context.trail))
        )

    def finding(self, context: ErrorContext) -> Finding | None:
        facts = _function(self.detect)(context)
        finding: Finding | None = _function(self.rule)(facts) if facts is not None else None
        return finding


@functools.cache
def _function(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(f"nbdebug.tools.errors.{module}"), name)
    return function


ON_DEVICE = r"assert|memory access|misaligned|launch|cublas|cudnn"
KINDS: tuple[ErrorKind, ...] = (
    ErrorKind(
        "kinds.collate.detect",
        "rules.dataloader.collate_mismatch",
        files=r"[\\/]utils[\\/]data[\\/]_utils[\\/](collate|fetch)\.py$",  # whatever is raised there
    ),
    ErrorKind(
        "kinds.workers.detect",
        "rules.dataloader.loader_worker_died",
        r"dataloader|re-initialize|open files|ancdata|space left|memory|mmap|bootstrap|pickl|local object|lookup|"
        r"^(connectionreset|eof|brokenpipe)error",
    ),
    ErrorKind(
        "kinds.files.detect_image",
        "rules.files.corrupt_image",
        r"UnidentifiedImage|identify image",
    ),
    ErrorKind(
        "kinds.files.detect_cut_image",
        "rules.files.truncated_image",
        r"truncated|broken (data|png)|premature end|unrecognized data|incomplete",
    ),
    ErrorKind(
        "kinds.files.detect_syntax",
        "rules.files.syntax",
        r"decodeerror|(scanner|parser|composer|constructor|reader|yaml)error",
    ),
    ErrorKind(
        "kinds.files.detect_missing",
        "rules.files.file_not_found",
        r"^FileNotFound|hub|repo|local folder|model identifier|404|gated|restricted|offline|local cache|connect to|"
        r"couldn't reach|entry|can't load|outgoing|requested files|hfvalid|doesn't exist|does not appear|"
        r"authenticated|review",
    ),
    ErrorKind("kinds.objects.detect_attached", "rules.objects.attached_to_graph", r"numpy\(\)"),
    ErrorKind("kinds.objects.detect_pickle", "rules.calls.not_picklable", r"pickle|local object"),
    ErrorKind("kinds.objects.detect_copy", "rules.calls.deepcopy_of_graph", r"deepcopy protocol"),
    ErrorKind(
        "kinds.objects.detect_no_iterator",
        "rules.calls.not_an_iterator",
        r"is not an iterator|attribute 'next'|not subscriptable",
    ),
    ErrorKind(
        "kinds.objects.detect_unpacking",
        "rules.calls.unpack_mismatch",
        r"values to unpack|'str' object has no attribute",
    ),
    ErrorKind("kinds.objects.detect_wrapped", "rules.calls.wrapped_object", r"object has no attribute"),
    ErrorKind(
        "kinds.calls.detect_module", "rules.calls.incomplete_module", r"required .forward|before Module\.__init__"
    ),
    ErrorKind(
        "kinds.calls.detect_order",
        "rules.calls.call_order",
        r"Tried to step|_scale is None|inf checks|has already been called|called after step",
    ),
    ErrorKind(
        "kinds.calls.detect_chances",
        "rules.calls.not_probabilities",
        r"between 0 and 1|probability|multinomial distribution|Expected parameter",
    ),
    ErrorKind(
        "kinds.calls.detect_length",
        "rules.calls.dataset_length",
        r"num_samples|IterableDataset|input lengths|has no len",
    ),
    ErrorKind(
        "kinds.calls.detect",
        "rules.calls.wrong_argument",
        r"positional argument|keyword(-only)? argument|not iterable|not subscriptable|not callable|Module subclass|"
        r"operand type|tuple of Tensors|got float|'float'|not float|slice indices|device string|cannot assign|"
        r"Boolean value|hx|out of bounds|only optimize Tensors",
    ),
    ErrorKind("kinds.objects.detect_exhausted", "rules.objects.iterator_exhausted", r"stopiteration"),
    ErrorKind(
        "kinds.objects.detect",
        "rules.objects.not_a_tensor",
        r"must be|no attribute|indices must|unsupported operand|invalid combination|as element|slice",
    ),
    ErrorKind(
        "kinds.distributed.detect",
        "rules.distributed.nccl",
        r"^Dist|nccl|gloo|process|distributed|collective|rendezvous|c10d|store|clients|DDP|"
        r"reduction|ready only|backend|socket",
    ),
    ErrorKind(
        "kinds.cuda.detect_unavailable", "rules.cuda.cuda_unavailable", r"cuda|nvidia|driver|device|kernel|compatible"
    ),
    ErrorKind("kinds.cuda.detect_index", "rules.indices.index_out_of_range", ON_DEVICE),
    ErrorKind("kinds.cuda.detect_assert", "rules.cuda.device_assert", ON_DEVICE),
    ErrorKind(
        "kinds.devices.detect",
        "rules.devices.device_mismatch",
        r"device|[cg]pu|cuda|numpy|meta|generator|tensors (to be )?on",
    ),
    ErrorKind(
        "kinds.dtypes.detect",
        "rules.dtypes.dtype_mismatch",
        r"type|autocast|overflow|must be tensor|ndarray|too many dim|byte order|long|indices|one_hot|bool|float|"
        r"implemented|precision|complex|cast|integral",
    ),
    ErrorKind("kinds.cuda.detect_not_started", "rules.cuda.cudnn_not_initialized", r"cudnn_status"),
    ErrorKind("kinds.cuda.detect_attention", "rules.cuda.attention_kernel_missing", r"kernel|viable backend|flash"),
    ErrorKind(
        "kinds.cuda.detect_cudnn",
        "rules.cuda.cudnn_not_supported",
        r"cudnn|cublas|contiguous|engine|execution plan|miopen",
    ),
    ErrorKind(
        "kinds.indices.detect",
        "rules.indices.index_out_of_range",
        r"index|indices|target|out of (range|bounds)|out-of-bounds|class values|bincount|'from'",
    ),
    ErrorKind("autograd.backward_twice.detect", "autograd.rules.backward_twice", r"second time|unpacked|backward"),
    ErrorKind(
        "autograd.in_place.detect",
        "autograd.rules.inplace_modified",
        r"in-?place|memory location|written-to|out=|leaf|view",
    ),
    ErrorKind(
        "autograd.no_grad.detect",
        "autograd.rules.no_grad_path",
        r"grad|graph|parameter list|non-leaf|inference|attribute|operand|nonetype",
    ),
    ErrorKind("kinds.state_dict.detect_model", "rules.state_dict.state_dict_mismatch", r"state.?dict"),
    ErrorKind(
        "kinds.state_dict.detect_optimizer",
        "rules.state_dict.state_dict_mismatch",
        r"state.?dict|param.?group|parameter group",
    ),
    ErrorKind("kinds.imports.detect", "rules.imports.module_not_found", r"import|module|attribute|pickl|global"),
    ErrorKind(
        "shapes.detect.detect",
        "shapes.rules.shape_mismatch",
        r"shape|size|dim|ax[ei]s|\dd\b|\d-d|length|batch|channel|element|columns|operand|subscript|einsum|hidden|hx|"
        r"mask|src|feature|kernel|padding|blocks|target|ctc|weight|array|ind(ex|ices)|vector|matri|divisible|"
        r"num_groups|grid|convert|ambiguous|unpack",
    ),
)
"""The narrow before the wide."""
CURES = {
    "error/no-grad-path": "autograd.trials.cured",
    "error/backward-twice": "autograd.trials.cured",
    "error/inplace-modified": "autograd.trials.cured",
    "error/collate-mismatch": "kinds.collate.cured",
}
"""What makes edits of the fixes of a code, and tries them elsewhere than from the failing line on."""
MOST_FINDINGS = 5
"""For the members of one group of exceptions together."""


@dataclasses.dataclass
class Explanation:
    """findings: one for each member of a group that is recognized, at most one where there is no group. notes: what
    could not be examined."""

    findings: list[Finding] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def find_causes(
    error: BaseException,
    names: Mapping[str, Any],
    detect_first: Callable[[BaseException], Finding | None] = lambda error: None,
) -> Explanation:
    """The causes of an exception, of those that led to it and of the members of a group. detect_first: another tool's
    finding about one of them, or None."""
    explanation = Explanation()
    for chain in candidate_chains(error):
        for candidate in chain:
            finding = detect_first(candidate.error) or _finding(candidate, names, explanation.notes)
            if finding is not None:
                if finding not in explanation.findings and len(explanation.findings) < MOST_FINDINGS:
                    explanation.findings.append(finding)
                break
    return explanation


def _finding(candidate: Candidate, names: Mapping[str, Any], notes: list[str]) -> Finding | None:
    try:
        context = ErrorContext.of(candidate.error, names, candidate.led_to)
    except Exception as error:  # whatever hostile object is in the frames: the next exception may be readable
        notes.append(f"The frames of the {type(candidate.error).__name__} could not be read ({type(error).__name__}).")
        return None
    finding = _recognized(context, notes)
    return None if finding is None else dataclasses.replace(finding, chain=(*finding.chain, *_aftermath(context)))


def _recognized(context: ErrorContext, notes: list[str]) -> Finding | None:
    """What the first kind says that recognizes an exception."""
    for kind in KINDS:
        try:
            finding = kind.finding(context) if kind.may_apply(context) else None
        except Exception as error:  # a fault of ours, or an object that raises when it is read: the other kinds go on
            name = kind.detect.split(".")[-2].replace("_", " ")
            notes.append(f"nbdebug could not check for {name} here ({type(error).__name__}).")
            continue
        if finding is not None:
            return _in_users_names(context, _proven(context, finding, notes))
    return None


def _in_users_names(context: ErrorContext, finding: Finding) -> Finding:
    """The finding with the user's one model in the code of its suggestions, where these say `model` and the user has no
    such name. A loss with no parameters is no model."""
    space = {**context.names, **{name: value for frame in context.users for name, value in frame.names.items()}}
    trained = [n for n, m in context.owners.models.items() if n in space and any(True for _ in named_parameters(m))]
    if len(trained) != 1 or "model" in space or any("model" in frame.globals for frame in context.users):
        return finding
    fixes = [
        fix
        if fix.edit is not None or re.search(r"\bmodel = ", fix.code)
        else dataclasses.replace(fix, code=re.sub(r"(?<![\w.'\"])model\b(?!['\"])", trained[0], fix.code))
        for fix in finding.fixes
    ]
    return dataclasses.replace(finding, fixes=tuple(fixes))


def _proven(context: ErrorContext, finding: Finding, notes: list[str]) -> Finding:
    """With each fix that is called tried as an edit that was tried; all others are suggestions."""
    if finding.code in CURES and context.users:
        try:
            finding = _function(CURES[finding.code])(context, finding)
        except Exception as error:
            notes.append(f"nbdebug could not try a fix on the program ({type(error).__name__}).")
    if finding.code not in CURES and context.users and any(fix.edit is not None for fix in finding.fixes):
        try:
            finding = _function("autograd.trials.edits_tried")(context, finding)
        except Exception as error:
            notes.append(f"nbdebug could not try a fix on the program ({type(error).__name__}).")
    if all(fix.edit is not None or not fix.verified for fix in finding.fixes):
        return finding
    try:
        from nbdebug.tools.errors.continuation import proven  # only where there is a fix to prove

        return proven(context, finding)
    except Exception as error:
        notes.append(f"nbdebug could not run the program on with a fix ({type(error).__name__}).")
        plain = (dataclasses.replace(fix, verified=None, after={}) if fix.verified else fix for fix in finding.fixes)
        return dataclasses.replace(finding, fixes=tuple(plain))


def contexts_of_text(text: str, names: Mapping[str, Any]) -> list[ErrorContext]:
    """The exceptions of a copied traceback, or a copied message: only their words are known, and no values."""
    contexts = []
    for one in exceptions_of_text(text):
        trail = with_remote_frames(one, [])
        error = type(one.type, (RuntimeError,), {})(one.message)
        contexts.append(ErrorContext(error, trail, names, Owners.among({}, trail), (), one))
    return contexts


def causes_of_text(text: str) -> Explanation:
    """What the words of a copied traceback or message show: the first exception of the chain that is recognized; else
    the pages of the catalogue that have its words among their symptoms."""
    explanation = Explanation()
    for context in contexts_of_text(text, {}):
        finding = _recognized(context, explanation.notes)
        if finding is not None:
            explanation.findings.append(finding)
            break
    return explanation


def _aftermath(context: ErrorContext) -> list[Link]:
    """How the cause reached the user: the process it came from, and the exceptions that followed it."""
    links = [Link(f"it was raised {context.carried.where}")] if context.carried else []
    for error in context.led_to[:5]:
        message = clip(message_of(error).strip().partition("\n")[0], 160)
        links.append(Link(f"`{type(error).__name__}` followed from it: {message}".rstrip(": ")))
    return links


def unknown_error(error: BaseException, names: Mapping[str, Any]) -> Report:
    """The report on an error of no known kind: on the first candidate."""
    candidates = [candidate for chain in candidate_chains(error) for candidate in chain] or [Candidate(error)]
    return report_of(ErrorContext.of(candidates[0].error, names, candidates[0].led_to))
