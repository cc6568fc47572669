"""The values of the symbols at which programs are compared."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from onnxpar_format.entries import ProgramEntry, SymbolEntry
from onnxpar_format.expressions import bare_name
from onnxpar_runtime.errors import InputError, SymbolValueError
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.npz import convert
from onnxpar_runtime.symbol_checks import check_values, symbol_values

Array = NDArray[Any]


def chosen_cases(
    manifest: Manifest,
    program: ProgramEntry,
    cases: Sequence[Mapping[str, int]],
    feeds: Mapping[str, Array] | None,
) -> tuple[list[dict[str, int]], dict[str, Array] | None]:
    """Returns the values of the symbols, and the given inputs in the types of the program.

    Args:
        manifest: The manifest.
        program: The program whose inputs are compared.
        cases: Values of symbols; missing symbols get a default. Without cases the default is used.
        feeds: The inputs, whose shapes determine the symbols; None for random ones.

    Raises:
        OnnxparRuntimeError: There are cases and inputs, or a case or an input does not fit.
    """
    if feeds is None:
        chosen = [complete_case(manifest, program, case) for case in cases]
        return chosen or default_cases(manifest, program), None
    if cases:
        raise InputError(
            "expected inputs or symbols, got both (the shapes of the inputs determine the symbols)"
        )
    given = convert(program.inputs, feeds)
    shapes = {name: a.shape for name, a in given.items()}
    return [symbol_values(manifest.symbols, program, shapes)], given


def symbols_of(manifest: Manifest, program: ProgramEntry) -> dict[str, SymbolEntry]:
    """Returns the symbols of the program's inputs, with constraints, in order of first use."""
    names = [bare_name(size) for spec in program.inputs for size in spec.shape]
    return {n: manifest.symbols.get(n, SymbolEntry()) for n in names if n is not None}


def complete_case(
    manifest: Manifest, program: ProgramEntry, case: Mapping[str, int]
) -> dict[str, int]:
    """Returns a case with a value for every symbol.

    Raises:
        SymbolValueError: The case names an unknown symbol or violates a constraint.
    """
    known = symbols_of(manifest, program)
    for name in case:
        if name not in known:
            raise SymbolValueError(
                f"expected a symbol of the inputs, one of {', '.join(sorted(known))}, got {name!r}"
            )
    default = default_cases(manifest, program)[0]
    tied = _tied(known, program)
    # The value of one of several equal symbols is that of all.
    given = {tied[name]: value for name, value in case.items() if name in tied}
    values = {name: case.get(name, given.get(tied[name], default[name])) for name in known}
    check_values(known, program, values)
    return values


def default_cases(manifest: Manifest, program: ProgramEntry) -> list[dict[str, int]]:
    """Returns an even case, an uneven one and the smallest, as far as the constraints allow."""
    picks = _offers(manifest, program, lambda symbol: _picks(symbol, manifest.devices))
    count = min(3, max((len(p) for p in picks.values()), default=1))
    return [{n: p[min(i, len(p) - 1)] for n, p in picks.items()} for i in range(count)]


def _offers(
    manifest: Manifest, program: ProgramEntry, offer: Callable[[SymbolEntry], list[int]]
) -> dict[str, list[int]]:
    """Returns values for each symbol that all symbols equal to it admit."""
    known = symbols_of(manifest, program)
    tied = _tied(known, program)
    found: dict[str, list[int]] = {}
    for name in known:
        alike = [known[other] for other in known if tied[other] == tied[name]]
        offered = [value for symbol in alike for value in offer(symbol)]
        fits = [value for value in offered if all(symbol.admits(value) for symbol in alike)]
        found[name] = list(dict.fromkeys(fits or offered))
    for equal in program.equal_sizes:
        numbers = [size for size in equal.sizes if isinstance(size, int)]
        names = [tied.get(bare_name(size) or "") for size in equal.sizes]
        found |= {name: numbers for name in known if numbers and tied[name] in names}
    return found


def _tied(known: Mapping[str, SymbolEntry], program: ProgramEntry) -> dict[str, str]:
    """Returns for each symbol the first of the symbols that must be equal to it."""
    first = {name: name for name in known}
    pairs: list[tuple[str | None, str | None]]
    pairs = [(name, symbol.same_as) for name, symbol in known.items()]
    pairs += [(bare_name(e.sizes[0]), bare_name(e.sizes[1])) for e in program.equal_sizes]
    for one, other in pairs:
        if one in first and other in first:
            low, high = sorted((first[one], first[other]), key=list(known).index)
            first = {name: low if of == high else of for name, of in first.items()}
    return first


def _picks(symbol: SymbolEntry, devices: int) -> list[int]:
    near = symbol.admissible(devices + 1, 2 * devices + 2) or symbol.admissible(1, 4)[::-1]
    smallest = symbol.admissible(1, 1)
    even = [v for v in near if v % devices == 0]
    # An odd value if possible, which is not divisible by the sizes of a mesh of powers of two.
    uneven = [v for v in near if v % 2 and v % devices] or [v for v in near if v % devices]
    picks = [*even[:1], *uneven[:1], *smallest, *near]
    return list(dict.fromkeys(picks))[:3]
