"""Dataclass ↔ JSON, strictly: what does not fit is refused by the name of its field, and nothing is coerced.

A key whose field has a default may be absent, so that a record can gain a field; any other absent key and every
unknown key is an error. Numbers are finite: JSON has no NaN, and a quantity that is unknown is None.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from cattrs import (
    BaseConverter,
    BaseValidationError,
    Converter,
    ForbiddenExtraKeysError,
    IterableValidationError,
    IterableValidationNote,
    transform_error,
)

from probes.errors import StoreError

T = TypeVar("T")

_SCALARS = (str, int, float, bool, NoneType)


def encode(record: Any) -> Any:
    """What ``json.dumps`` takes: dicts, lists, strings, finite numbers, booleans and None.

    Raises ``StoreError`` naming the field that holds a NaN, an infinity or something else that JSON has not.
    """
    document = _CONVERTER.unstructure(record)
    for path, value in _leaves(document, type(record).__name__):
        if isinstance(value, float) and not math.isfinite(value):
            raise StoreError(f"{path} is not a finite number", hint="a quantity that is unknown must be None")
        if not isinstance(value, _SCALARS):
            raise StoreError(f"{path} is a {type(value).__name__}, which JSON cannot hold")
    return document


def decode(document: Any, record_type: type[T]) -> T:
    """The ``record_type`` that ``encode`` made ``document`` from. Raises ``StoreError`` naming the wrong field."""
    if not isinstance(document, dict):
        raise StoreError(f"{record_type.__name__}: expected an object with named fields")
    try:
        return _CONVERTER.structure(document, record_type)
    except BaseValidationError as error:
        first = transform_error(error, path=record_type.__name__, format_exception=_say)[0]
        what, _, where = first.rpartition(" @ ")
        raise StoreError(f"{where}: {what}") from error


def to_text(document: Any) -> str:
    """``document`` as compact JSON, in ASCII, so that a file name that is no UTF-8 survives."""
    return json.dumps(document, allow_nan=False, separators=(",", ":"))


def digest(document: Any) -> str:
    """SHA-256 of ``document`` as JSON; the order of keys does not count."""
    text = json.dumps(document, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def from_text(text: str | bytes) -> Any:
    """The document in ``text``. Raises ``ValueError`` where it is not JSON, or holds a NaN or an infinity."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def _converter() -> Converter:
    converter = Converter(forbid_extra_keys=True, unstruct_collection_overrides={tuple: list})
    converter.register_unstructure_hook(StrEnum, lambda member: member.value)
    converter.register_structure_hook(StrEnum, lambda value, kind: kind(value))
    for scalar in (str, int, float, bool):
        converter.register_structure_hook(scalar, _scalar)
    converter.register_structure_hook_func(_is_union_of_scalars, _scalar)
    converter.register_structure_hook_factory(_is_tuple, _tuple_hook)
    return converter


def _is_tuple(target: Any) -> bool:
    return get_origin(target) is tuple


def _is_union_of_scalars(target: Any) -> bool:
    return get_origin(target) in (UnionType, Union) and all(member in _SCALARS for member in get_args(target))


def _scalar(value: Any, target: Any) -> Any:
    """cattrs would make a string of anything and a number of ``"1"``; only an int where a float is due may pass."""
    allowed = get_args(target) or (target,)
    if isinstance(value, float) and float in allowed:
        return float(value) + 0.0  # −0.0 becomes 0.0, as SQLite keeps it
    if type(value) in allowed:
        return value
    if type(value) is int and float in allowed and abs(value) <= sys.float_info.max:
        return float(value)
    names = " or ".join("null" if kind is NoneType else kind.__name__ for kind in allowed)
    raise ValueError(f"expected {names}, not {type(value).__name__}")


def _tuple_hook(target: Any, converter: BaseConverter) -> Callable[[Any, Any], tuple[Any, ...]]:
    """From a list only, of the exact length where it is fixed: cattrs would take any iterable, a string too."""
    members = get_args(target)
    repeated = len(members) == 2 and members[1] is Ellipsis

    def structure(value: Any, _target: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ValueError(f"expected a list, not {type(value).__name__}")
        if not repeated and len(value) != len(members):
            raise ValueError(f"expected {len(members)} values, not {len(value)}")
        result = []
        for index, item in enumerate(value):
            member = members[0 if repeated else index]
            try:
                result.append(converter.structure(item, member))
            except Exception as error:
                error.add_note(IterableValidationNote("", index, member))
                raise IterableValidationError("", [error], target) from error
        return tuple(result)

    return structure


def _say(error: BaseException, _target: type | None) -> str:
    if isinstance(error, KeyError):
        return "this field is missing"
    if isinstance(error, ForbiddenExtraKeysError):
        return f"unknown field {', '.join(sorted(error.extra_fields))}"
    if isinstance(error, ValueError):
        return str(error)
    return "expected an object with named fields"


_CONVERTER = _converter()
