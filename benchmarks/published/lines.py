"""A line of the comparison: the published value, the computed one, and whether they agree."""

from dataclasses import dataclass

NOT_AT_HAND = "not at hand"


@dataclass(frozen=True)
class Line:
    """One figure or statement. ``verdict`` is one of: as printed, differs, known to differ, holds, FAILS, nothing."""

    figure: str
    what: str
    published: str
    computed: str
    difference: str
    verdict: str
    source: str

    @property
    def good(self) -> bool:
        return self.verdict not in ("FAILS", "differs")


def number(
    figure: str, what: str, published: str | None, computed: float, source: str, *, judge: bool = True, known: str = ""
) -> Line:
    """Compares a computed figure with the published one. The verdict is "as printed" if it rounds to the printed
    digits.

    Args:
        published: as printed; None if we do not have it.
        judge: False where the paper does not say how its figure was obtained, so that only the difference is shown.
        known: why the figure is known to differ.
    """
    if published is None:
        return Line(figure, what, NOT_AT_HAND, f"{computed:.5g}", "", "", source)
    digits = len(published.partition(".")[2])
    difference = computed - float(published)
    # Half a unit of the last digit, and the rounding of the subtraction.
    equal = abs(difference) <= 0.5 * 10.0**-digits + 1e-12
    verdict = "as printed" if equal else (known or ("differs" if judge else ""))
    return Line(figure, what, published, f"{computed:.{digits + 2}f}", f"{difference:+.{digits + 2}f}", verdict, source)


def statement(figure: str, what: str, holds: bool, computed: str, source: str, *, published: str = "holds") -> Line:
    return Line(figure, what, published, computed, "", "holds" if holds else "FAILS", source)
