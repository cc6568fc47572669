"""Sentences about a report that several commands print."""

from typing import Any

from onnxpar.cli.screen import amount
from onnxpar.report.page_data import UPDATE
from onnxpar_format.texts import bytes_text

SHOWN = 5
"""The most items of a list in a sentence."""


def describe_program(report: dict[str, Any]) -> dict[str, str]:
    """Returns a sentence about each: devices, nodes, collectives; parameters and pairs if any."""
    totals = report["totals"]
    lines = {
        "devices": f"{report['devices']}{_mesh(report)}",
        "nodes": f"{totals['nodes']:,}: {_nodes(report)}",
    }
    if totals["padding"]:
        lines["padding"] = _padding(totals["padding"])
    if "once" in totals:
        lines["micro-batches"] = describe_pair(totals)
    if totals["parameters"]:
        lines["parameters"] = (
            f"{totals['parameters']:,}, {describe_held(totals)} on {describe_device(report)}"
        )
    kinds, run = describe_kinds(totals), "a micro-batch" if _updates(report) else "a run"
    lines["collectives"] = f"{kinds}; {_sent(report)} in {run}" if kinds else "none"
    return lines


def describe_updates(report: dict[str, Any]) -> dict[str, str]:
    """Returns what the update of the parameters sends, in a pipeline for each stage."""
    found = {}
    for stage, totals in _updates(report).items():
        kinds, size = describe_kinds(totals), totals["bytes"]
        text = f"{kinds}; a device sends {amount(size)} bytes in a step" if kinds else "none"
        found[f"update {stage}".rstrip()] = text
    return found


def _updates(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the totals of the programs that update parameters, by their stages."""
    named = {tuple(name.partition(".")[::2]): data for name, data in report["programs"].items()}
    return {stage: data["totals"] for (name, stage), data in named.items() if name == UPDATE}


def describe_kinds(totals: dict[str, Any]) -> str:
    """Returns how many collectives there are of each kind; an empty text if there are none."""
    kinds = ", ".join(f"{n:,} {op}" for op, n in totals["collectives_by_op"].items())
    if totals["calls"] < totals["collectives"]:
        kinds += f" in {count(totals['calls'], 'call')}"
    return kinds


def describe_pair(totals: dict[str, Any]) -> str:
    """Returns how often the nodes of a program of two micro-batches are there."""
    once = totals["once"]
    shared = f", and {once:,} that both share" if once else ""
    each = count((totals["nodes"] - once) // 2, "node")
    return f"two micro-batches take turns: {each} for each of them{shared}"


def describe_held(totals: dict[str, Any]) -> str:
    """Returns how many bytes of the parameters a device holds."""
    held, of = totals["parameter_bytes_per_device"], totals["parameter_bytes"]
    return f"{bytes_text(held)} of {bytes_text(of)}"


def describe_growth(state: dict[str, Any]) -> str:
    """Returns how a state of a forward program changes from run to run."""
    if state["grows"] is None:
        return "keeps its size"
    return f"grows along dim {state['grows']}" + (", in place" if state["appends"] else "")


def _mesh(report: dict[str, Any]) -> str:
    """Returns the text after the number of devices: the stages, and the mesh of each stage."""
    stages, axes = report["stages"], report["mesh"]["axes"]
    mesh = f"mesh {' x '.join(f'{n}={s}' for n, s in axes.items())}" if axes else ""
    if stages == 1:
        return f", {mesh}" if mesh else ""
    return f" in {stages} stages, each with the {mesh}" if mesh else f" in {stages} stages"


def describe_device(report: dict[str, Any]) -> str:
    """Returns which device is meant: stages hold different parameters."""
    return "each device" if report["stages"] == 1 else "each device of the fullest stage"


def _sent(report: dict[str, Any]) -> str:
    """Returns what a device sends; a program's collectives are those of all its stages."""
    sent = f"{amount(report['totals']['bytes'])} bytes"
    if symbols := report["totals"].get("grows_faster_than"):
        sent += f" (growing faster than {' and '.join(symbols)})"
    if report["stages"] == 1:
        return f"a device sends {sent}"
    return f"summed over the stages, a device sends {sent}"


def _nodes(report: dict[str, Any]) -> str:
    """Returns the number of nodes of each kind: sharded, or replicated for one of two reasons."""
    totals = report["totals"]
    names, replicated = [item["name"] for item in report["replicated"]], totals["replicated"]
    unsplit = totals["nodes"] - totals["sharded"] - replicated
    parts = [f"{totals['sharded']:,} sharded"]
    if unsplit:
        parts.append(f"{unsplit:,} replicated: none of their dims is sharded")
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        parts.append(
            f"{replicated:,} replicated: no sharding rule ({', '.join(names[:SHOWN])}{more})"
        )
    return ", ".join(parts)


def _padding(found: dict[str, dict[str, int]]) -> str:
    """Returns how many nodes set padding, and the options that make them unnecessary."""
    nodes = count(sum(item["nodes"] for item in found.values()), "node")
    options = [f"--symbol {name}:divisor={item['divisor']}" for name, item in found.items()]
    always = [f"{name} is always a multiple of {item['divisor']}" for name, item in found.items()]
    return f"set by {nodes}; if {' and '.join(always)}, shard without them: {' '.join(options)}"


def count(number: int, noun: str) -> str:
    """Returns the number with the noun, which is plural unless the number is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def describe_conflict(item: dict[str, Any]) -> str:
    """Returns one conflict of a report in a line."""
    reader = f"{item['node']} operand {item['operand']}" if item["node"] else "the output"
    return (
        f"{item['value']} {item['from']} -> {item['to']} for {reader}: "
        f"{' '.join(item['steps'])}, {amount(item['bytes'])} bytes ({item['reason']})"
    )
