"""A saved adapter was loaded with strict=False, under names that the model lacks."""

from tests.quality.adapters import factors, network, trained

CODE, NAMES = "quality/adapter-not-loaded", ["`0`", "`2`"]


def loaded(prefix):
    file = factors(trained(network()).model)
    run = network()
    run.model.load_state_dict({prefix + name: value for name, value in file.items()}, strict=False)
    run.saved = {f"base_model.model.{name}": value for name, value in file.items()}
    return run


def sick():
    return loaded("base_model.model.")


def healthy():
    return loaded("")
