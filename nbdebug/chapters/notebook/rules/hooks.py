"""Rule for hooks that a cell, run again, has registered once more."""

from __future__ import annotations

from nbdebug.catalogue import rule
from nbdebug.chapters.notebook.facts import NotebookFacts
from nbdebug.chapters.notebook.rules.words import cell, finding, listed
from nbdebug.finding import Finding, Fix, Link


@rule(
    code="notebook/hooks-registered-twice",
    title="A hook is registered more than once: its cell ran again.",
    symptom="Each layer appears twice in a record of activations, counts are off by a whole factor, a gradient is "
    "scaled or clipped twice, and every forward is slower than before.",
    cause="`register_forward_hook` and its like add a hook each time they are called. The hooks of the run before stay "
    "until their handles' `remove()` is called, also where the handles are gone.",
    confirm="`len(module._forward_hooks)`; `%free` lists hooks that are there more than once.",
    fix="Keep the handles and remove them first in the same cell. `%free hooks` takes away all but the newest.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_forward_hook",
)
def hooks_registered_twice(facts: NotebookFacts) -> Finding | None:
    if not facts.hooks:
        return None
    one = max(facts.hooks, key=lambda hook: len(hook.owners))
    others = [hook for hook in facts.hooks if hook is not one]
    root = one.owners[0].partition(".")[0]
    on = listed(one.owners, 3) if len(one.owners) > 1 or one.owners[0] != root else f"`{root}`"
    title = (
        f"The {one.word} `{one.hook}` is registered {_times(one.times)} on {on}: {cell(one.where)} called "
        f"{one.method} again, and nothing removed the hook of {cell(one.first, 'the run before')}"
    )
    chain = [Link(f"{cell(one.first)} registered it first", one.first)] if one.first.cell else []
    chain += [Link(f"so is the {hook.word} `{hook.hook}` on {listed(hook.owners)}", hook.where) for hook in others]
    code = (
        f"for handle in handles:  # those of the run before\n    handle.remove()\n"
        f"handles = [{root}.{one.method}({one.hook if one.hook.isidentifier() else 'hook'})]"
    )
    fixes = [
        Fix(
            "Remove the hooks that are too many; the newest stay.",
            "%free hooks",
            None,
            {"hooks that would go": sum((hook.times - 1) * len(hook.owners) for hook in facts.hooks)},
        ),
        Fix("In the cell, remove the old ones before new ones are registered.", code),
    ]
    return finding(
        "notebook/hooks-registered-twice",
        title,
        one.where,
        [*one.owners, root, one.method],
        fixes,
        chain,
        times=one.times,
        registered_on=list(one.owners[:20]),
    )


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"
