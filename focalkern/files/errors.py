"""The error of a file or an argument, and its remedy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Hint", "InputError"]


@dataclass(frozen=True)
class Hint:
    """The remedy of an error as an argument and its value. The command prints it as an option.

    Attributes:
        argument: the name of an argument.
        value: the value to pass.

    Example:
        >>> hint = fk.files.Hint("labels_key", "NAME")
        >>> print(hint)
        labels_key=NAME
    """

    argument: str
    value: str

    def __str__(self) -> str:
        return f"{self.argument}={self.value}"


class InputError(Exception):
    """A file or an argument cannot be used. The message is one line with its name, the expected and the found content.

    Args:
        source: the file; or the whole message if nothing else is given.
        expected, found: descriptions.
        hint: the arguments that solve the problem: one, several together, or alternatives separated by ``"or"``.

    Attributes:
        hints: the argument ``hint`` as a tuple.

    Example:
        >>> try:
        ...     fk.files.read_sets("logits.txt")
        ... except fk.files.InputError as error:
        ...     print(str(error)[:40])
        logits.txt: expected .npz, .pt, .pth, .s
    """

    def __init__(
        self, source: str, expected: str = "", found: str = "", *, hint: Hint | Sequence["Hint | str"] = ()
    ) -> None:
        self.words = f"{source}: expected {expected}, found {found}" if expected else source
        self.hints = (hint,) if isinstance(hint, Hint) else tuple(hint)
        super().__init__(self._spelled(str))

    def _spelled(self, spell: Callable[[Hint], str], between: str = ", ") -> str:
        """The error as one line.

        Args:
            spell: function that returns the text of a hint.
            between: separator of hints.

        Returns:
            The expected and the found content, and the hints.
        """
        hints = between.join(spell(part) if isinstance(part, Hint) else f" {part} " for part in self.hints)
        hints = hints.replace(f"{between} ", " ").replace(f" {between}", " ").strip()  # words separate two hints
        line = f"{self.words}; pass {hints}" if hints else self.words
        return line.replace("\r", r"\r").replace("\n", r"\n")  # which the names of files may have

    def _renamed(self, **arguments: str) -> "InputError":
        """The same error with the argument names of another reader.

        Args:
            arguments: for a name in a hint, the other name: ``labels="test_labels"``.

        Returns:
            The new error.
        """
        hints = [
            Hint(arguments.get(part.argument, part.argument), part.value) if isinstance(part, Hint) else part
            for part in self.hints
        ]
        return InputError(self.words, hint=hints)

    def __reduce__(self) -> Any:
        return _input_error, (self.words, self.hints)


def _input_error(words: str, hints: Sequence[Hint | str]) -> InputError:
    return InputError(words, hint=hints)
