"""Facts about an unknown integer: congruence and bounds, and arithmetic on them.

`Facts` is the reduced product of two classic abstract domains: arithmetical congruences (Granger,
"Static analysis of arithmetical congruences", 1989) and intervals (Cousot and Cousot, 1977). Every
function here is sound: if `x` satisfies the given facts, the result of the operation on `x`
satisfies the returned facts.
"""

from dataclasses import dataclass
from functools import reduce
from math import comb, gcd


@dataclass(frozen=True, slots=True)
class Facts:
    """The integers `x` with `x ≡ remainder (mod divisor)` and `min ≤ x ≤ max`.

    Attributes:
        divisor: The modulus; 0 means that the value is the constant `remainder` (every integer
            divides 0, so gcd arithmetic needs no special case for constants).
        remainder: In `[0, divisor)`, or the constant itself.
        min: Lower bound, a member of the congruence class; None if there is none.
        max: Upper bound, a member of the congruence class; None if there is none.
    """

    divisor: int = 1
    remainder: int = 0
    min: int | None = None
    max: int | None = None

    @property
    def constant(self) -> int | None:
        """The value if only one is possible, else None."""
        return self.remainder if self.divisor == 0 else None

    def admits(self, value: int) -> bool:
        """Whether `value` satisfies every fact."""
        if self.divisor == 0:
            return value == self.remainder
        return (
            (value - self.remainder) % self.divisor == 0
            and (self.min is None or value >= self.min)
            and (self.max is None or value <= self.max)
        )

    def divisible(self, k: int) -> bool:
        """Whether `k != 0` divides every value."""
        return self.divisor % k == 0 and self.remainder % k == 0

    @property
    def content(self) -> int:
        """The greatest integer that is known to divide every value (0 for the constant 0)."""
        return gcd(self.divisor, self.remainder)


UNKNOWN = Facts()


def constant(value: int) -> Facts:
    """Returns the facts of a known integer."""
    return Facts(0, value, value, value)


def make(
    divisor: int, remainder: int, low: int | None = None, high: int | None = None
) -> Facts | None:
    """Returns the facts in canonical form, with bounds that are members of the class.

    Args:
        divisor: The modulus, at least 0; 0 for a constant.
        remainder: Any member of the class, or the constant.
        low: A lower bound, None for none.
        high: An upper bound, None for none.

    Returns:
        The facts, or None if no integer satisfies them.
    """
    if divisor == 0:
        if (low is not None and remainder < low) or (high is not None and remainder > high):
            return None
        return constant(remainder)
    remainder %= divisor
    if low is not None:
        low += (remainder - low) % divisor
    if high is not None:
        high -= (high - remainder) % divisor
    if low is not None and high is not None:
        if low > high:
            return None
        if low == high:
            return constant(low)
    return Facts(divisor, remainder, low, high)


def _known(divisor: int, remainder: int, low: int | None, high: int | None) -> Facts:
    """Returns `make`, or `UNKNOWN` if no integer satisfies the facts.

    The facts of an expression are empty only if the constraints of its operands contradict each
    other. Then every claim about it is true, and `UNKNOWN` claims the least.
    """
    return make(divisor, remainder, low, high) or UNKNOWN


def meet(a: Facts, b: Facts) -> Facts:
    """Returns the facts of a value that satisfies both (by the Chinese remainder theorem)."""
    if a.divisor == 0 or b.divisor == 0:
        return a if a.divisor == 0 else b
    common = gcd(a.divisor, b.divisor)
    if (a.remainder - b.remainder) % common:
        return UNKNOWN
    step = b.divisor // common
    turns = (b.remainder - a.remainder) // common * pow(a.divisor // common, -1, step) % step
    return _known(
        a.divisor * step,
        a.remainder + a.divisor * turns,
        _highest(a.min, b.min),
        _lowest(a.max, b.max),
    )


def join(a: Facts, b: Facts) -> Facts:
    """Returns the facts of a value that satisfies either."""
    low = None if a.min is None or b.min is None else min(a.min, b.min)
    high = None if a.max is None or b.max is None else max(a.max, b.max)
    return _known(gcd(a.divisor, b.divisor, a.remainder - b.remainder), a.remainder, low, high)


def add(a: Facts, b: Facts) -> Facts:
    """Returns the facts of `a + b`."""
    low = None if a.min is None or b.min is None else a.min + b.min
    high = None if a.max is None or b.max is None else a.max + b.max
    return _known(gcd(a.divisor, b.divisor), a.remainder + b.remainder, low, high)


def negate(a: Facts) -> Facts:
    """Returns the facts of `-a`."""
    low = None if a.max is None else -a.max
    high = None if a.min is None else -a.min
    return _known(a.divisor, -a.remainder, low, high)


def multiply(a: Facts, b: Facts) -> Facts:
    """Returns the facts of `a · b`: (d₁m + r₁)(d₂n + r₂) = d₁d₂·mn + d₁r₂·m + d₂r₁·n + r₁r₂."""
    divisor = gcd(a.divisor * b.divisor, a.divisor * b.remainder, b.divisor * a.remainder)
    low, high = _product_bounds(a, b)
    return _known(divisor, a.remainder * b.remainder, low, high)


def power(a: Facts, exponent: int) -> Facts:
    """Returns the facts of `a ** exponent`, `exponent >= 0`.

    The binomial theorem keeps more of the congruence than repeated products: it shows that the
    square of an odd number is 1 modulo 4.
    """
    if exponent == 0:
        return constant(1)
    terms = (
        comb(exponent, k) * a.divisor**k * a.remainder ** (exponent - k)
        for k in range(1, exponent + 1)
    )
    low, high = a.min, a.max
    if exponent % 2 == 0:
        ends = [abs(end) for end in (low, high) if end is not None]
        high = max(ends) if len(ends) == 2 else None
        one_sign = (low is not None and low >= 0) or (a.max is not None and a.max <= 0)
        low = min(ends) if one_sign else 0
    return _known(
        reduce(gcd, terms),
        a.remainder**exponent,
        None if low is None else low**exponent,
        None if high is None else high**exponent,
    )


def divide_exact(a: Facts, b: Facts) -> Facts:
    """Returns the facts of `a / b`, which is known to be an integer.

    The divisors are not simply divided: 8·m by 4·n need not be a multiple of 2, since 8 / 8 is 1.
    Only the factor that `a` and `b` share for certain counts.
    """
    if b.divisor == 0:
        return _divide_by_constant(a, b.remainder) if b.remainder else UNKNOWN
    low, high = _quotient_bounds(a, b, exact=True)
    # q·b ≡ 0 modulo `shared`; as shared | b.divisor, gcd(b, shared) is the same for every b.
    shared = gcd(a.content, b.divisor)
    return _known(shared // gcd(shared, b.remainder), 0, low, high)


def _divide_by_constant(a: Facts, k: int) -> Facts:
    """Facts of the integer q with k·q = a: the congruence k·q ≡ r (mod d) solved for q."""
    if k < 0:
        a, k = negate(a), -k
    common = gcd(a.divisor, k)
    if a.remainder % common:
        return UNKNOWN
    low = None if a.min is None else -(-a.min // k)
    high = None if a.max is None else a.max // k
    if a.divisor == 0:
        return constant(a.remainder // k)
    modulus = a.divisor // common
    return _known(modulus, a.remainder // common * pow(k // common, -1, modulus), low, high)


def floor_divide(a: Facts, b: Facts) -> Facts:
    """Returns the facts of `a // b` (towards minus infinity); none if `b` may be 0."""
    if b.divisor == 0 and b.remainder:
        k = b.remainder
        if k < 0:
            a, k = negate(a), -k
        low = None if a.min is None else a.min // k
        high = None if a.max is None else a.max // k
        if a.divisor % k == 0:  # (k·e·m + r) // k = e·m + r // k
            return _known(a.divisor // k, a.remainder // k, low, high)
        return _known(1, 0, low, high)
    low, high = _quotient_bounds(a, b, exact=False)
    return _known(1, 0, low, high)


def modulo(a: Facts, b: Facts) -> Facts:
    """Returns the facts of `a % b`, which has the sign of `b`; none if `b` may be 0."""
    if b.max is not None and b.max < 0:
        return negate(modulo(negate(a), negate(b)))
    if b.min is None or b.min <= 0:
        return UNKNOWN
    if a.min is not None and a.min >= 0 and a.max is not None and a.max < b.min:
        return a
    high = None if b.max is None else b.max - 1
    if a.min is not None and a.min >= 0:
        high = _lowest(high, a.max)
    # a % b = a - b·(some integer), and b·(any integer) is a multiple of b's content.
    remainder = _known(gcd(a.divisor, b.content), a.remainder, 0, high)
    if b.constant is not None and a.min is not None and a.max is not None:
        k = b.constant
        if a.min // k == a.max // k:  # all values of a are in one period
            return meet(remainder, add(a, constant(-(a.min // k) * k)))
    return remainder


def maximum(a: Facts, b: Facts) -> Facts:
    """Returns the facts of `max(a, b)`."""
    if a.min is not None and b.max is not None and a.min >= b.max:
        return a
    if b.min is not None and a.max is not None and b.min >= a.max:
        return b
    either = join(a, b)
    return _known(either.divisor, either.remainder, _highest(a.min, b.min), either.max)


def minimum(a: Facts, b: Facts) -> Facts:
    """Returns the facts of `min(a, b)`."""
    return negate(maximum(negate(a), negate(b)))


def _lowest(a: int | None, b: int | None) -> int | None:
    """The smaller of two bounds; None is no bound."""
    return b if a is None else a if b is None else min(a, b)


def _highest(a: int | None, b: int | None) -> int | None:
    """The greater of two bounds; None is no bound."""
    return b if a is None else a if b is None else max(a, b)


def _product_bounds(a: Facts, b: Facts) -> tuple[int | None, int | None]:
    """Bounds of a product: its extreme values at the bounds; at infinite bounds the sign counts."""
    finite: list[int] = []
    infinite_signs: set[int] = set()
    for x, x_sign in ((a.min, -1), (a.max, 1)):
        for y, y_sign in ((b.min, -1), (b.max, 1)):
            if x is not None and y is not None:
                finite.append(x * y)
            elif x == 0 or y == 0:
                finite.append(0)
            else:
                x_sign = x_sign if x is None else (1 if x > 0 else -1)
                y_sign = y_sign if y is None else (1 if y > 0 else -1)
                infinite_signs.add(x_sign * y_sign)
    low = None if -1 in infinite_signs else min(finite, default=None)
    high = None if 1 in infinite_signs else max(finite, default=None)
    return low, high


def _quotient_bounds(a: Facts, b: Facts, exact: bool) -> tuple[int | None, int | None]:
    """Bounds of a / b, rounded down or (exact) known to be an integer; none if b may be 0."""
    if b.max is not None and b.max < 0:
        a, b = negate(a), negate(b)
    if b.min is None or b.min <= 0:
        return None, None
    low: int | None = None
    high: int | None = None
    if a.min is not None:
        # The least quotient is that of the largest b if a is at least 0, else of the least b.
        by = b.max if a.min >= 0 else b.min
        if by is None:
            low = 1 if exact and a.min > 0 else 0
        else:
            low = -(-a.min // by) if exact else a.min // by
    if a.max is not None:
        by = b.min if a.max >= 0 else b.max
        high = -1 if by is None else a.max // by
    return low, high
