"""A fault: text of csrc/cuda that is replaced by other text."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    name: str
    file: str  # in csrc/cuda
    old: str  # must occur once, or `nth` says which occurrence
    new: str
    nth: int = 0

    def plant(self, text: str) -> str:
        at = -1
        for _ in range(self.nth + 1):
            at = text.index(self.old, at + 1)
        return text[:at] + self.new + text[at + len(self.old) :]
