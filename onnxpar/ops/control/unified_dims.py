"""Which dims of many tensors are the same: a union-find of dims and of their parts.

A dim has one part until an operator splits it into several, major first, as a Reshape separates
batch from heads. It then has these parts wherever it occurs.
"""

from collections.abc import Sequence

from onnxpar.core.symbols import Dim, SymbolTable, exact_div


class DimParts:
    """Parts of dims, which rules unify.

    Attributes:
        table: What is known of symbols.
        fixed: For each part that must not be sharded, the reason.
    """

    def __init__(self, table: SymbolTable) -> None:
        """Creates a record without parts."""
        self.table = table
        self.fixed: dict[int, str] = {}
        self._sizes: list[Dim] = []
        self._parent: list[int] = []
        self._inside: dict[int, tuple[int, ...]] = {}

    def new(self, size: Dim) -> int:
        """Returns a new part of this global size."""
        self._sizes.append(size)
        self._parent.append(len(self._parent))
        return len(self._parent) - 1

    def size(self, part: int) -> Dim:
        """Global size of a part."""
        return self._sizes[self._root(part)]

    def leaves(self, parts: Sequence[int]) -> list[int]:
        """Returns the smallest parts of these parts, in order; equal parts have equal numbers."""
        found: list[int] = []
        for part in parts:
            root = self._root(part)
            inside = self._inside.get(root)
            found += [root] if inside is None else self.leaves(inside)
        return found

    def forbid(self, parts: Sequence[int], why: str) -> None:
        """Notes that parts must not be sharded; the first reason stays."""
        for leaf in self.leaves(parts):
            self.fixed.setdefault(leaf, why)

    def unify(
        self, ones: Sequence[int], others: Sequence[int], why: str, *, assume: bool = False
    ) -> None:
        """Notes that two lists of parts are the same; a part is split where the other is finer.

        Parts that are not proved to have equal sizes must not be sharded, for the reason given. But
        with `assume`, two single parts are assumed to be equal unless both sizes are numbers.
        """
        left, right = self.leaves(ones), self.leaves(others)
        if assume and len(left) == len(right) == 1:
            sizes = [self.size(p) for p in (*left, *right)]
            if not all(isinstance(size, int) for size in sizes):
                self._join(left[0], right[0])
                return
        while left and right:
            a, b = left[0], right[0]
            one, other = self.size(a), self.size(b)
            if a == b or self.table.equal(one, other):
                self._join(a, b)
                left.pop(0)
                right.pop(0)
            elif (rest := exact_div(one, other)) is not None:
                left[:1] = self._split(a, other, rest)
            elif (rest := exact_div(other, one)) is not None:
                right[:1] = self._split(b, one, rest)
            else:
                break
        self.forbid([*left, *right], why)

    def _split(self, part: int, major: Dim, minor: Dim) -> list[int]:
        why = self.fixed.get(part)
        inside = (self.new(major), self.new(minor))
        self._inside[part] = inside
        if why is not None:
            self.forbid(inside, why)
        return list(inside)

    def _root(self, part: int) -> int:
        while self._parent[part] != part:
            self._parent[part] = self._parent[self._parent[part]]
            part = self._parent[part]
        return part

    def _join(self, a: int, b: int) -> None:
        a, b = self._root(a), self._root(b)
        if a == b:
            return
        self._parent[b] = a
        why = self.fixed.pop(b, None)
        if why is not None:
            self.fixed.setdefault(a, why)
        if not isinstance(self._sizes[a], int) and isinstance(self._sizes[b], int):
            self._sizes[a] = self._sizes[b]
