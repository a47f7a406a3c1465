"""A card for a saved calibrator, in Markdown: data, date, metrics with intervals, intended use and limits."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from focalkern._checks import count_rows, path_text
from focalkern._types import InputKind
from focalkern.calibrators import Calibrator, load_calibrator
from focalkern.calibrators._candidates import keeps_predictions
from focalkern.calibrators._document import columns_of_fit
from focalkern.calibrators._verdict import describe_method, sentence
from focalkern.study.report.page import python_lines
from focalkern.study.samples import SCORES

__all__ = ["calibrator_card"]

# The paper of each method of a file.
_SOURCES = {
    "temperature": "Guo et al. 2017, arXiv 1706.04599: temperature scaling",
    "robust-temperature": "Guo et al. 2017, arXiv 1706.04599: temperature scaling",
    "focal-temperature": "Komisarenko & Kull 2024, arXiv 2408.11598: focal temperature scaling",
    "spline": "focalkern's documentation, *Spline scaling*: the focal calibration map with a learned curve",
}


def calibrator_card(path: str | os.PathLike[str]) -> str:
    """A card for a saved calibrator, for colleagues who will use it.

    Its sections follow the model cards of Hugging Face: details, uses, how to start, data, evaluation, limits, source.
    Data, date and metrics come from :meth:`focalkern.Study.save` or ``focalkern calibrate``. If the file of the
    calibrator lacks them, or has other evidence, the card says that they are not recorded.

    Args:
        path: the file of the calibrator.

    Returns:
        Markdown text. Metrics are fractions.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a calibrator, or is of a newer version.

    Source: Mitchell et al. 2019 (arXiv 1810.03993), model cards.

    Example:
        >>> labels = torch.arange(600) % 3
        >>> logits = 4.0 * torch.eye(3)[(labels + (torch.arange(600) % 5 == 0)) % 3]  # confident, wrong in 1 of 5 rows
        >>> study = fk.compare_calibrators((logits[:300], labels[:300]), (logits[300:], labels[300:]), resamples=0)
        >>> study.save("calibrator.json")
        >>> print(fk.study.calibrator_card("calibrator.json").splitlines()[6])
        # calibrator.json: spline matrix scaling
    """
    name = path_text("calibrator_card", "path", path)
    calibrator = load_calibrator(name)
    document = json.loads(Path(name).read_text("utf-8"))
    found = document["fit"].get("evidence", {})
    evidence = found if isinstance(found, dict) else {}

    def made(section: Callable[..., str], *arguments: Any) -> str:
        try:
            return section(*arguments, evidence)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # evidence of another form
            return section(*arguments, {})

    method = made(_method, document)
    kind: InputKind = getattr(calibrator, "input_kind", "logits")
    parts = {
        "": made(_front_matter, Path(name).name, method),
        "Details": made(_details, document, calibrator, method),
        "Uses": made(_uses, calibrator),
        "How to start": "\n".join(["```python", *python_lines(name, kind), "```"]),
        "Data": made(_data),
        "Evaluation": made(_evaluation),
        "Limits": made(_limits, document),
        "Source": f"{_SOURCES.get(document['method'], 'focalkern')}.",
    }
    return "\n\n".join(f"## {head}\n\n{text}" if head else text for head, text in parts.items()) + "\n"


def _method(document: Mapping[str, Any], evidence: Mapping[str, Any]) -> str:
    row: Mapping[str, Any] = next((one for one in evidence.get("table", ()) if one.get("chosen")), {})
    return describe_method(row.get("method", document["method"].replace("robust-", "")))


def _front_matter(name: str, method: str, evidence: Mapping[str, Any]) -> str:
    use = sentence(f"Use {evidence['use']}") if "use" in evidence else ""
    head = f"---\nlibrary_name: focalkern\ntags:\n- calibration\n---\n\n# {name}: {method}"
    return f"{head}\n\n{_ascii_off(use)}" if use else head


def _details(document: Mapping[str, Any], calibrator: Calibrator, method: str, evidence: Mapping[str, Any]) -> str:
    classes = document["fit"].get("classes") or columns_of_fit(document)
    parameters = {
        name: document[key] for name, key in (("gamma", "gamma"), ("T", "temperature")) if _is_number(document.get(key))
    }
    rows = {
        "method": method,
        "parameters": ", ".join(f"{name} = {value:.4g}" for name, value in parameters.items()),
        "made": evidence.get("made", "not recorded"),
        "made by": f"focalkern {document.get('focalkern', '')}",
        "input": f"{getattr(calibrator, 'input_kind', 'logits')}, [N, {calibrator.n_classes_}]",
        "classes": ", ".join(map(str, classes)) if classes else f"0 to {calibrator.n_classes_ - 1}",
        "predicted classes": "unchanged" if keeps_predictions(calibrator) else "may change",
    }
    return _table(["", ""], [[name, str(value)] for name, value in rows.items() if value])


def _uses(calibrator: Calibrator, evidence: Mapping[str, Any]) -> str:
    source = evidence.get("data", {}).get("validation", {}).get("source")
    of = f"the network whose outputs are in `{source}`" if source else "the network whose outputs it was fitted on"
    lines = [
        f"For: {of}, with the same {calibrator.n_classes_} classes in the same order, on data of the same source as "
        "the validation rows.",
        "Not for: another network, or the same one after more training. Fit a new calibrator.",
        "Not for: data from another source (another hospital, camera or year). Evaluate it there first"
        + ("." if keeps_predictions(calibrator) else "; a calibrator with `keep_predictions=True` is safer there."),
        "Not for: the detection of inputs that belong to none of the classes.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _data(evidence: Mapping[str, Any]) -> str:
    data = evidence.get("data")
    if not data:
        return "Not recorded."
    parts = {"validation and test": "validation"} if data["same_rows"] else {"validation": "validation", "test": "test"}
    rows = [
        [
            role,
            f"`{one['source']}`",
            one["set"] or "",
            one["input_kind"],
            f"{one['n_samples']:,}",
            str(one["n_classes"]),
        ]
        for role, one in ((role, data[key]) for role, key in parts.items())
    ]
    return _table(["rows for", "file", "set", "input", "rows", "classes"], rows)


def _evaluation(evidence: Mapping[str, Any]) -> str:
    results = evidence.get("table")
    if not results:
        return "Not recorded. `Study.save` and `focalkern calibrate` record it."
    names = ("accuracy", "nll", "brier", f"ece_{evidence.get('estimator', 'equal_width')}")
    rows = []
    for one in results:
        if one["test"] is None or not (one["chosen"] or one["method"] in ("none", "temperature")):
            continue
        if one["criterion"] == "ece" and not one["chosen"]:
            continue
        label = "uncalibrated" if one["method"] == "none" else describe_method(one["method"])
        intervals = one.get("intervals") or {}
        cells = [_score(one["test"].get(name), intervals.get(name)) for name in names]
        bold = "**" if one["chosen"] else ""
        rows.append([f"{bold}{label}{bold}", *cells])
    heads = [SCORES[name].replace("_\n", "_").replace("\n", " ") for name in names]
    data, bootstrap = evidence.get("data", {}), evidence.get("bootstrap")
    of = count_rows(data["test"]["n_samples"], "test ") if data else "the test rows"
    if data.get("same_rows"):
        of = f"{count_rows(data['test']['n_samples'])} of the fit (optimistic)"
    words = [f"Fractions, on {of}."]
    if bootstrap:
        words.append(
            f"In brackets: {100 * bootstrap['level']:g} % intervals of {bootstrap['resamples']:,} bootstrap resamples."
        )
    if "because" in evidence:
        words.append(evidence["because"])
    return f"{_table(['', *heads], rows)}\n\n{_ascii_off(' '.join(words))}"


def _limits(document: Mapping[str, Any], evidence: Mapping[str, Any]) -> str:
    said = [evidence.get("costs", ""), *evidence.get("warnings", ()), *document["fit"].get("warnings", ())]
    lines = [f"- {_ascii_off(sentence(one))}" for one in dict.fromkeys(said) if one]
    return "\n".join(lines) or "The checks of the fit found none."


def _score(value: float | None, interval: Sequence[float] | None) -> str:
    if value is None:
        return "infinite"
    return f"{value:.4f}" + (f" ({interval[0]:.4f} to {interval[1]:.4f})" if interval else "")


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) and math.isfinite(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A line of text per row: a cell's line breaks become spaces."""
    lines = [head, ["---"] * len(head), *rows]
    cells = ([" ".join(cell.replace("|", r"\|").splitlines()) for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _ascii_off(text: str) -> str:
    """Replaces the ASCII of a terminal by arrows and plus-minus signs."""
    return text.replace("->", "\u2192").replace("+-", "\u00b1")
