"""The tokenizer is tried out before the workers are forked."""

from types import SimpleNamespace

CODE, NAMES = "environment/tokenizers-fork", ("TOKENIZERS_PARALLELISM",)


def machine(env):
    return SimpleNamespace(
        facts={
            "platform": "linux",
            "env": env,
            "run": {"num_workers": 2, "start_method": "fork", "tokenizer_used_before_workers": True},
        }
    )


def sick():
    return machine({})


def healthy():
    return machine({"TOKENIZERS_PARALLELISM": "false"})
