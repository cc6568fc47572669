"""Writes the page about a directory, or about two, and a run of it."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from onnxpar.api import runtime
from onnxpar.core.errors import DirectoryError
from onnxpar.core.machine import PRESETS, Machine
from onnxpar.report.page_data import directory_page, page_data
from onnxpar.report.read_directory import blamed_on_report
from onnxpar.report.read_log import read_log
from onnxpar.report.trace_data import trace_data
from onnxpar.report.trace_table import trace_table
from onnxpar.report.write_page import page_html
from onnxpar_format.new_file import check_file, new_file


def report_page(
    directories: Sequence[Path],
    out: Path,
    *,
    sizes: Mapping[str, int] | None = None,
    machine: Machine = PRESETS["cpu"],
    log: Path | None = None,
    trace: Path | None = None,
) -> None:
    """Writes a page that shows how a model was sharded; a browser opens it without a network.

    Args:
        directories: One directory, or two to compare.
        out: The page; it is written completely or not at all.
        sizes: The sizes of symbols that the page shows first; for others those of the trace, or
            `Symbol.typical`.
        machine: The machine whose times are predicted.
        log: A file that `train --log` has written.
        trace: A file that `--trace` has written.

    Raises:
        OnnxparError: A directory or a file cannot be read, or the page cannot be written.
    """
    if not 1 <= len(directories) <= 2:
        raise DirectoryError(f"expected one directory or two to compare, got {len(directories)}")
    check_file(out, DirectoryError)
    run = None if trace is None else {"name": trace.name, **trace_data(trace_table(trace))}
    run_sizes = {} if run is None else run["measured"]["sizes"]
    pages = []
    for directory in directories:
        predict = partial(runtime.pipeline_times, directory)
        with blamed_on_report(directory):
            pages.append(directory_page(directory, sizes or {}, machine, predict, run_sizes))
    known = {symbol["name"] for page in pages for symbol in page["symbols"]}
    if unknown := sorted((sizes or {}).keys() - known):
        those = ", ".join(sorted(known)) or "none"
        raise DirectoryError(f"expected a symbol of the model, one of {those}, got {unknown[0]!r}")
    data = page_data(pages)
    if log is not None:
        data["log"] = {"name": log.name, **read_log(log)}
    if trace is not None and run is not None:
        data["trace"] = {**run, "directory": _directory_of(trace, len(run["ranks"]), pages)}
    title = " and ".join(str(directory) for directory in directories)
    with new_file(out, DirectoryError) as file:
        # A changed manifest may have lone surrogates, which UTF-8 cannot encode.
        file.write_text(page_html(data, title), encoding="utf-8", errors="replace")


def _directory_of(trace: Path, ranks: int, pages: Sequence[Mapping[str, Any]]) -> int:
    """Returns the place of the directory that a trace of so many ranks belongs to."""
    devices = [page["devices"] for page in pages]
    if ranks not in devices:
        made = " or ".join(f"{page['devices']} ranks, as {page['name']} has" for page in pages)
        raise DirectoryError(f"{trace}: expected a trace of {made}, got one of {ranks}")
    return devices.index(ranks)
