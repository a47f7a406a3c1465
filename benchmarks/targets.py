"""The goals of the operators on two cores, and the recorded values."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import readable, recorded_medians

# (rows x classes, times faster than the fastest other provider)
LOSS = (("65536x10", 3.0), ("65536x100", 2.5), ("8192x1000", 2.5), ("1024x32000", 2.0), ("64x19x128x128", 2.0))
GRID = (("10000x10", 100.0), ("10000x100", 100.0), ("10000x1000", 200.0))
MAP = (("forward", 4.0), ("forward+backward", 3.0))
BF16_SPEEDUP, GAMMA_COST = 1.5, 1.05
# The other losses of rows, compared with the faster of their published code in eager mode and compiled.
FAMILY = (("128x10", 1.5), ("8192x20", 2.0), ("256x1000", 2.0), ("1024x32000", 2.0))
SIGMOID_DENSE, SIGMOID_LABELS, SIGMOID_SMALL, SIGMOID_COPIES, SIGMOID_BF16 = 3.0, 4.0, 1.5, 6.0, 1.3
GRID_SECONDS, GRID_MIB, IMPORT_MS, BUILD_SECONDS = 20.0, 256.0, 150.0, 120.0

# The name of a goal, its bound, the recorded value, and whether it is met.
Line = tuple[str, str, str, bool]


def at_least(what: str, found: float, bound: float) -> Line:
    return what, f">= {bound:g} x", f"{readable(found)} x", found >= bound


def at_most(what: str, found: float, bound: float, unit: str) -> Line:
    return what, f"<= {bound:g} {unit}", f"{readable(found)} {unit}", found <= bound


def others(ratios: dict[str, float]) -> dict[str, float]:
    return {name: ratio for name, ratio in ratios.items() if not name.startswith("focalkern")}


def loss_lines(out: Path) -> Iterator[Line]:
    times, ratios = recorded_medians("focal_loss", out), recorded_medians("focal_loss", out, "speedup")
    copies = recorded_medians("focal_loss", out, "ratio_to_copy")
    for shape, bound in LOSS:
        key = f"forward+backward {shape}", "float32"
        if key in ratios and others(ratios[key]):
            best = others(ratios[key])
            name = min(best, key=lambda provider: best[provider])
            yield at_least(f"focal_loss {shape}, against {name}, the fastest other", best[name], bound)
    slowest = {
        case: min(others(found).values())
        for (case, dtype), found in ratios.items()
        if dtype == "float32" and others(found)
    }
    tiny = "forward+backward 32x10"
    large = {case: ratio for case, ratio in slowest.items() if case != tiny}
    if large:
        case = min(large, key=lambda case: large[case])
        shape = case.removeprefix("forward+backward ")
        yield at_least(f"focal_loss, the least favourable of {len(large)} shapes ({shape})", large[case], 1.0)
    if "cross_entropy" in ratios.get((tiny, "float32"), {}):
        yield at_least("focal_loss 32x10, against cross_entropy", ratios[tiny, "float32"]["cross_entropy"], 1.0)
    for name in ("focalkern, gamma per sample", "focalkern, gamma table"):
        recorded = {shape: ratios.get((f"forward+backward {shape}", "float32"), {}) for shape, _ in LOSS}
        costs = {shape: found[name] for shape, found in recorded.items() if name in found}
        if costs:
            shape = max(costs, key=lambda shape: costs[shape])
            what = f"focal_loss, {name.removeprefix('focalkern, ')}, worst of {len(costs)} shapes ({shape})"
            yield at_most(what, costs[shape], GAMMA_COST, "of scalar")
    for shape, _ in LOSS:
        single, half = (times.get((f"forward+backward {shape}", dtype)) for dtype in ("float32", "bfloat16"))
        if single and half:
            ratio = single["focalkern"] / half["focalkern"]
            yield at_least(f"focal_loss {shape}, bfloat16 against float32", ratio, BF16_SPEEDUP)
    key = "forward+backward 8192x1000", "float32"
    if key in copies:
        yield at_most("focal_loss 8192x1000", copies[key]["focalkern"], 2.0, "of a copy")


def family_lines(out: Path) -> Iterator[Line]:
    ratios = {case: others(found) for (case, _), found in recorded_medians("losses", out, "speedup").items()}
    for shape, bound in FAMILY:
        published = {
            case: min(ratio for name, ratio in found.items() if name != "cross_entropy")
            for case, found in ratios.items()
            if case.endswith(f" {shape}")
        }
        if published:
            case = min(published, key=lambda case: published[case])
            what = f"the other losses at {shape}, against their published code, worst of {len(published)}"
            yield at_least(f"{what} ({case.removesuffix(f' {shape}')})", published[case], bound)
    beside = {case: found["cross_entropy"] for case, found in ratios.items() if "cross_entropy" in found}
    if beside:
        case = min(beside, key=lambda case: beside[case])
        yield at_least(f"the other losses, against cross_entropy, worst of {len(beside)} ({case})", beside[case], 1.0)


def sigmoid_lines(out: Path) -> Iterator[Line]:
    times, ratios = recorded_medians("sigmoid_loss", out), recorded_medians("sigmoid_loss", out, "speedup")
    copies = recorded_medians("sigmoid_loss", out, "ratio_to_copy")
    large, small = (
        {dtype: (f"sigmoid focal {shape}, memory kept", dtype) for dtype in ("float32", "bfloat16")}
        for shape in ("160000x80", "64x80")
    )
    key = large["float32"]
    name = "sigmoid_focal_loss 160000x80"
    if key in ratios:
        found = ratios[key]
        compiled = found["published formula, compiled"]
        yield at_least(f"{name}, against its formula, compiled", compiled, SIGMOID_DENSE)
        yield at_least(f"{name}, labels, against the same", compiled / found["focalkern, labels"], SIGMOID_LABELS)
        yield at_least(f"{name}, against compiled BCE", found["BCE, compiled"], 1.0)
        yield at_most(name, copies[key]["focalkern"], SIGMOID_COPIES, "copies")
        if large["bfloat16"] in times:
            ratio = times[key]["focalkern"] / times[large["bfloat16"]]["focalkern"]
            yield at_least(f"{name}, bfloat16 against float32", ratio, SIGMOID_BF16)
    if small["float32"] in ratios:
        found = ratios[small["float32"]]
        fastest = min(ratio for name, ratio in found.items() if name.startswith("published"))
        yield at_least("sigmoid_focal_loss 64x80, against its formula", fastest, SIGMOID_SMALL)


def map_lines(out: Path) -> Iterator[Line]:
    ratios = recorded_medians("calibration_map", out, "speedup")
    for direction, bound in MAP:
        for provider in ("composite", "composite, compiled"):
            found = {
                case.removeprefix(f"{direction} "): ratio[provider]
                for (case, _), ratio in ratios.items()
                if case.startswith(f"{direction} ") and provider in ratio
            }
            for shape in ("65536x10", "10000x100", "10000x1000"):
                if shape in found:
                    yield at_least(f"calibration_map, {direction}, {shape}, against {provider}", found[shape], bound)


def grid_lines(out: Path) -> Iterator[Line]:
    times, ratios = recorded_medians("calibration_grid", out), recorded_medians("calibration_grid", out, "speedup")
    memory = recorded_medians("calibration_grid", out, "peak_extra_mib")

    def key(shape: str) -> tuple[str, str]:
        return f"4500 cells {shape}", "float32"

    for shape, bound in GRID:
        if key(shape) in ratios:
            yield at_least(f"calibration_grid {shape}, against the loop", ratios[key(shape)]["per-cell loop"], bound)
    if key("3000x100") in times and key("30000x100") in times:
        growth = times[key("30000x100")]["focalkern"] / times[key("3000x100")]["focalkern"]
        yield at_most("calibration_grid, 30000 rows against 3000", growth, 11.0, "times the time")
    large = key("50000x1000")
    if large in times:
        yield at_most("calibration_grid 50000x1000", times[large]["focalkern"] / 1e3, GRID_SECONDS, "s")
        yield at_most("calibration_grid 50000x1000, extra memory", memory[large]["focalkern"], GRID_MIB, "MiB")


def package_lines(out: Path) -> Iterator[Line]:
    times = {case: found for (case, _), found in recorded_medians("package", out).items()}
    if found := times.get("import, torch included"):
        extra = found["focalkern"] - found["torch alone"]
        yield at_most("import focalkern beyond import torch", extra, IMPORT_MS, "ms")
    if found := times.get("build of the CPU extension"):
        yield at_most("build of the CPU extension", found["focalkern"] / 1e3, BUILD_SECONDS, "s")


LINES = (loss_lines, family_lines, sigmoid_lines, map_lines, grid_lines, package_lines)


def target_lines(out: Path) -> list[Line]:
    """The targets whose cases have records."""
    return [line for lines in LINES for line in lines(out)]
