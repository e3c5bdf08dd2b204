"""Public names, their arguments and their defaults stay as users know them."""
import importlib
import inspect

import pytest
from api_names import NAMES, NEVER_MORE_THAN, NOT_YET


def resolve(name: str) -> object:
    """The object behind a dotted name, LookupError where there is none."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and not module.startswith(error.name):
                raise  # the module is there and something that it imports is not
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                raise LookupError(name)
            found = getattr(found, part)
        return found
    raise LookupError(name)


def signature_faults(thing: object, expected: str) -> list:
    """How the parameters of a callable differ from what users were promised."""
    parameters = [parameter for parameter in inspect.signature(thing).parameters.values() if parameter.name != "self"]
    wanted = [item.strip() for item in split_arguments(expected)]
    faults = []
    for position, item in enumerate(wanted):
        name, _, default = item.partition("=")
        if position >= len(parameters):
            faults.append(f"{name} is missing")
            continue
        parameter = parameters[position]
        if name.startswith("*"):
            if parameter.kind is not parameter.VAR_POSITIONAL:
                faults.append(f"{parameter.name} stands where {name} was promised")
            continue
        if name != "_" and parameter.name != name:
            faults.append(f"argument {position + 1} is {parameter.name}, promised was {name}")
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            faults.append(f"{parameter.name} cannot be given by keyword")
        if default and repr(parameter.default) != repr(eval(default)):
            faults.append(f"{name} defaults to {parameter.default!r}, promised was {default}")
    faults += [f"{parameter.name} is new and has no default" for parameter in parameters[len(wanted):]
               if parameter.default is parameter.empty
               and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)]
    return faults


def split_arguments(text: str) -> list:
    """Arguments separated by commas outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


@pytest.mark.parametrize("name", sorted(set(NAMES) - NOT_YET))
def test_name_signature_and_call(name):
    expected, call = NAMES[name]
    thing = resolve(name)
    if expected is not None:
        faults = signature_faults(thing, expected)
        assert not faults, f"{name}: {'; '.join(faults)}"
    if call is not None:
        call(thing)


@pytest.mark.parametrize("name", sorted(NOT_YET))
def test_not_yet_only_shrinks(name):
    with pytest.raises(LookupError):
        resolve(name)
        pytest.fail(f"{name} is there now: take it out of NOT_YET in tests/api_names.py")


def test_not_yet_never_grows():
    assert NOT_YET <= set(NAMES)
    assert len(NOT_YET) <= NEVER_MORE_THAN


@pytest.mark.parametrize("thing, expected, fault", [
    (lambda update, clip: 0, "update, clip_norm", "argument 2 is clip"),
    (lambda update: 0, "update, clip_norm", "clip_norm is missing"),
    (lambda update, clip_norm, more: 0, "update, clip_norm", "more is new and has no default"),
    (lambda values, k=2: 0, "values, k=1", "k defaults to 2"),
    (lambda values, k: 0, "values, k=1", "promised was 1"),
    (lambda value, /: 0, "value", "cannot be given by keyword"),
    (lambda purpose, key: 0, "purpose, *key", "stands where *key"),
])
def test_a_changed_signature_is_found(thing, expected, fault):
    assert any(fault in found for found in signature_faults(thing, expected)), signature_faults(thing, expected)


def test_a_kept_signature_is_fine():
    assert not signature_faults(lambda seed, widths=(1, 2), device=None, **more: 0, "seed, widths=(1, 2)")


def test_an_unknown_name_is_not_resolved():
    for name in ("privfl.nothing", "privfl.update.nothing", "privfl.update.Layout.nothing"):
        with pytest.raises(LookupError):
            resolve(name)
