"""The JSON Schema of strategy files, with which editors complete keys and mark mistakes.

It says less than `Strategy.from_text` checks: nothing that depends on two places, such as that axes
are those of the mesh, or that an entry has numbers only or axes only. A test compares both.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from inspect import cleandoc
from typing import Any

from onnxpar.core.symbols import Symbol
from onnxpar.strategy.recompute_entry import COMMUNICATION
from onnxpar.strategy.schema import MAX_DEVICES, Strategy, StrategyFile

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_COUNT = {"type": "integer", "minimum": 1}
_DEVICES = _COUNT | {"maximum": MAX_DEVICES}
_MESH = {
    "type": "object",
    "minProperties": 1,
    "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_-]*$"},
    "additionalProperties": _DEVICES,
}
# The texts that `parse_bytes` reads, such as 80GiB; not negative ones.
_SIZE = r"^\s*\+?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*([KMGT]i)?B\s*$"
_NULL = {"type": "null"}
_AXES = ({"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1})
_DIM = {
    "description": "A number of shards, a mesh axis, several (outermost first), the components of "
    "a dim such as '(3 16:tp 64)', or ~ for a dim that is not sharded.",
    "anyOf": [
        _COUNT,
        *_AXES,
        _NULL,
    ],
}
_TENSOR = {
    "description": "One item for each dim of the tensor.",
    "type": "array",
    "items": {"$ref": "#/$defs/dim"},
}
_TENSORS = {
    "description": "One entry for each operand or result; ~ for one that follows from the others.",
    "type": "array",
    "items": {"anyOf": [{"$ref": "#/$defs/tensor"}, _NULL]},
}
_SPLIT = {"type": "object", "additionalProperties": {"anyOf": [*_AXES]}}
_NODES = {"type": "array", "items": {"type": "string"}}


def _bytes(least: int) -> dict[str, Any]:
    number = {"type": "integer", "minimum": least}
    return {"anyOf": [number, {"type": "string", "pattern": _SIZE}]}


_RECOMPUTE = {
    "anyOf": [
        _NODES | {"minItems": 1},
        _NULL,
        {
            "type": "object",
            "additionalProperties": False,
            "minProperties": 1,
            "properties": {
                "nodes": _NODES,
                "layers": _COUNT,
                "communication": {"enum": list(COMMUNICATION)},
                "memory": _bytes(1),
                "sizes": {"type": "object", "additionalProperties": _COUNT},
            },
        },
    ]
}
_DATASET = {
    "anyOf": [
        {"enum": ["data_parallel", "full_batch"]},
        {"type": "object", "additionalProperties": {"$ref": "#/$defs/tensor"}},
        _NULL,
    ]
}


def strategy_schema() -> dict[str, Any]:
    """Returns the schema, as JSON."""
    made: dict[str, Any] = StrategyFile.model_json_schema(by_alias=True)
    defs = made.pop("$defs")
    for name, section in defs.items():
        _tidy(section, _descriptions(section.pop("description", "")))
        section["title"] = name
    defs |= {"dim": _DIM, "tensor": _TENSOR, "symbol": _symbol()}
    # Names with readers of their own, about which pydantic knows nothing.
    own = made["properties"]
    own["mesh"] = {"anyOf": [_MESH, _NULL]}
    own["devices"] = {"anyOf": [_DEVICES, _NULL]}
    own["symbols"]["additionalProperties"] = {"$ref": "#/$defs/symbol"}
    own["parameters"]["additionalProperties"] = {"$ref": "#/$defs/tensor"}
    own["dataset"], own["recompute"] = dict(_DATASET), dict(_RECOMPUTE)
    node = defs["NodeEntry"]["properties"]
    for key, form in (("in", _TENSORS), ("out", _TENSORS), ("split", _SPLIT)):
        node[key] = form | {k: v for k, v in node[key].items() if k == "description"}
    for name in ("SearchEntry", "TargetEntry"):
        _size(defs[name], "memory", 1, _NULL)
    _size(defs["OptimizerParallelEntry"], "threshold", 0)
    texts = _descriptions(Strategy.__doc__ or "")
    _tidy(made, {"mesh": texts["axes"], **texts})
    return {
        "$schema": DRAFT,
        "title": "Strategy of onnxpar",
        **{k: v for k, v in made.items() if k not in ("title", "description")},
        "$defs": defs,
    }


def _size(section: dict[str, Any], key: str, least: int, *others: dict[str, Any]) -> None:
    text = section["properties"][key].get("description", "")
    forms = [*_bytes(least)["anyOf"], *others]
    section["properties"][key] = {"anyOf": forms, "description": text}


def _symbol() -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = {
        f.name: {"type": "boolean" if f.type is bool else "integer"} for f in fields(Symbol)
    }
    for name, least in (("divisor", 1), ("remainder", 0), ("min", 0)):
        kinds[name]["minimum"] = least
    return {
        "description": "Constraints on a symbolic dim: divisor · N + remainder, from min to max.",
        "type": "object",
        "additionalProperties": False,
        "properties": kinds,
    }


def _tidy(section: dict[str, Any], texts: Mapping[str, str]) -> None:
    """Replaces pydantic's titles by the descriptions of the attributes."""
    for key, form in section["properties"].items():
        form.pop("title", None)
        name = "inputs" if key == "in" else key
        if name in texts:
            form["description"] = texts[name]


def _descriptions(docstring: str) -> dict[str, str]:
    """Returns what a class's docstring says about each attribute."""
    _, _, listed = cleandoc(docstring).partition("Attributes:\n")
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", listed, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}
