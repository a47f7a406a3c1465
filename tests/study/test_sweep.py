"""A sweep over many networks."""

import csv
import importlib.util
import io
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import focalkern as fk
from focalkern.cli import sweep as cli_sweep
from focalkern.study import compare_calibrators
from focalkern.study.report import sweep as report_sweep
from focalkern.study.sweep import METHODS, SCORES, Sweep, _record_names, run_sweep, sweep, sweep_settings

pytest.importorskip("tabulate", reason="tabulate is not installed")


@pytest.fixture
def files(tmp_path):
    names = []
    for place, temperature in enumerate((0.7, 1.0, 2.0)):
        generator = torch.Generator().manual_seed(place)
        logits = 3 * torch.randn(240, 3, generator=generator)
        labels = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator).squeeze(1)
        name = tmp_path / f"network{place}.npz"
        np.savez(
            name,
            val_logits=logits[:120].numpy(),
            val_labels=labels[:120].numpy(),
            test_logits=logits[120:].numpy(),
            test_labels=labels[120:].numpy(),
        )
        names.append(str(name))
    return names


def test_every_network_is_what_a_comparison_finds(files, run, tmp_path):
    code, out, err = run("sweep", *files, "--all", "--report", tmp_path / "r", "--jobs", "1")
    assert code == 0, err
    assert err.splitlines() == [f"{place + 1} of 3: {name}" for place, name in enumerate(files)]
    document = json.loads((tmp_path / "r" / "sweep.json").read_text())
    with np.load(files[2]) as arrays:
        study = compare_calibrators(
            (arrays["val_logits"], arrays["val_labels"]), (arrays["test_logits"], arrays["test_labels"]), resamples=0
        )
    network = document["networks"][2]
    assert (network["name"], network["chosen"], network["n_test"]) == ("network2", study.chosen.method, 120)
    found = [one for one in study.results if not one.method.startswith("spline")]
    for method, row in zip(METHODS, (study.chosen, *found), strict=True):
        assert network["figures"][method] == pytest.approx({name: row.test[name] for name in SCORES})
    assert f"network2: {study.verdict.use}" in " ".join(out.split())
    with open(tmp_path / "r" / "sweep.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 3 * len(METHODS)
    assert float(rows[-1]["nll"]) == network["figures"]["focal, ECE"]["nll"]
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(tmp_path / "r" / "sweep.parquet")
    assert table.column_names == list(rows[0])
    for found, of_csv in zip(table.to_pylist(), rows, strict=True):
        assert ["" if cell is None else str(cell) for cell in found.values()] == list(of_csv.values())
    page = (tmp_path / "r" / "sweep.html").read_text()
    assert "network0" in page and "mean rank" in page and "<script" not in page
    assert page.index("Recommendations</h2>") < page.index("NLL</h2>")
    assert "\u2192" in page and "->" not in page and "-&gt;" not in page
    assert max(map(len, out.partition("Report:")[0].splitlines())) <= 100

    # A second run computes nothing and gives the same result.
    code, again, err = run("sweep", *files, "--all", "--report", tmp_path / "r", "--jobs", "1")
    assert (code, again) == (0, out)
    assert all(line.endswith("(known)") for line in err.splitlines())
    # Without --all the columns of the ECE are absent, and the others are the same bits.
    code, brief, err = run("sweep", *files, "--report", tmp_path / "r", "--jobs", "1")
    assert code == 0 and not any(line.endswith("(known)") for line in err.splitlines())
    assert brief.splitlines()[2].split() == ["auto", "none", "temperature", "focal"]
    fewer = json.loads((tmp_path / "r" / "sweep.json").read_text())
    assert fewer["methods"] == ["auto", "none", "temperature", "focal"]
    for ours, whole in zip(fewer["networks"], document["networks"], strict=True):
        assert list(ours["figures"]) == fewer["methods"]
        kept = {method: whole["figures"][method] for method in fewer["methods"]}
        assert ours == {**whole, "figures": kept}
    assert "with ECE" in page and "with ECE" not in (tmp_path / "r" / "sweep.html").read_text()
    joined = Sweep.from_records([fewer["networks"][0], document["networks"][1]])
    assert joined.methods == METHODS and math.isnan(joined.value(joined.networks[0], "focal, ECE", "nll"))
    # Another criterion is another task.
    fresh = []
    settings = sweep_settings(criterion="brier")
    run_sweep(files[:1], settings, folder=tmp_path / "r", done=lambda name, new: fresh.append(new))
    assert fresh == [True]


def test_a_known_result_is_of_the_same_contents(files, tmp_path):
    """Other files of the same name, size and time; other labels of the same logits; the same contents elsewhere."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 200, 3, generator=generator)
    labels = torch.multinomial((2 * logits[0]).softmax(-1), 1, generator=generator).squeeze(1)
    for place, folder in enumerate("ab"):
        np.savez(tmp_path / folder / "logits.npz", logits=logits[place].numpy(), labels=labels.numpy())
        os.utime(tmp_path / folder / "logits.npz", (1e9, 1e9))

    def figures(*names, **options):
        fresh = []
        names = [str(tmp_path / name) for name in names]
        settings = sweep_settings(**options)
        result = run_sweep(names, settings, folder=tmp_path / "r", done=lambda name, new: fresh.append(new))
        assert [network["path"] for network in result.networks] == names
        (found,) = [network["figures"]["none"]["nll"] for network in result.networks]
        return found, fresh

    own = {folder: figures(f"{folder}/logits.npz") for folder in "ab"}
    assert own["a"][0] != own["b"][0] and own["b"][1] == [True]
    (tmp_path / "b" / "logits.npz").rename(tmp_path / "logits.npz")
    assert figures("logits.npz") == (own["b"][0], [False])

    np.save(tmp_path / "logits.npy", logits[0].numpy())
    np.save(tmp_path / "labels.npy", labels.numpy())
    before = figures("logits.npy")
    assert before[1] == [True] and figures("logits.npy") == (before[0], [False])
    time = os.stat(tmp_path / "labels.npy").st_mtime_ns
    np.save(tmp_path / "labels.npy", (labels.numpy() + 1) % 3)
    os.utime(tmp_path / "labels.npy", ns=(time, time))
    after = figures("logits.npy")
    assert after[1] == [True] and after[0] > before[0] + 0.5
    np.save(tmp_path / "named.npy", labels.numpy())
    assert figures("logits.npy", labels=tmp_path / "named.npy") == (before[0], [True])


def test_the_page_of_many_networks_begins_with_their_means(tmp_path):
    figures = {method: {"nll": 0.5, "brier": 0.3, "ece_equal_width": 0.1} for method in METHODS[:4]}
    sizes = {"n_classes": 3, "n_validation": 5, "n_test": 7, "chosen": "none"}
    record = {"error": None, "criterion": "nll", "use": "no calibration", "figures": figures, **sizes}
    records = [{**record, "path": f"n{place}.npz"} for place in range(21)]
    for n, is_folded in ((1, False), (20, False), (21, True)):
        page = Sweep.from_records(records[:n]).to_html().decode()
        assert page.count("<details>") == (4 if is_folded else 0)
        assert ("1 network;" if n == 1 else f"{n} networks;") in page
        assert (page.index("mean rank") < page.index(">n0<", page.index("NLL</h2>"))) == is_folded
        assert page.count(">n0<") == 4 and page.count("mean rank") == 3


def test_sets_of_other_classes_are_refused(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "a.npz",
        val_logits=rng.normal(size=(90, 3)),
        val_labels=rng.integers(3, size=90),
        test_logits=rng.normal(size=(90, 6)),
        test_labels=rng.integers(6, size=90),
    )
    (reason,) = sweep([str(tmp_path / "a.npz")]).failed.values()
    assert reason == "expected val and test to be alike, found logits of 3 classes and logits of 6"


def test_a_file_that_cannot_be_used_is_no_reason_to_stop(files, run, tmp_path):
    (tmp_path / "bad.npz").write_bytes(b"no")
    code, out, err = run("sweep", tmp_path / "bad.npz", files[0], "nothing.npz", "--jobs", "1")
    assert code == 2
    assert "network0" in out
    assert f"focalkern sweep: {tmp_path / 'bad.npz'}: expected an .npz file" in err
    assert "focalkern sweep: nothing.npz: expected a file, found nothing there" in err


def test_a_sweep_without_a_usable_file_says_so(run, tmp_path):
    """A mean rank of 0 would be the best of all."""
    code, out, _ = run("sweep", "nothing.npz", "none.npz", "--report", tmp_path / "out", "--jobs", "1")
    assert code == 2
    assert out.startswith("No network could be compared: 2 of 2 files failed.\n")
    page = (tmp_path / "out/sweep.html").read_text()
    assert "No network could be compared: every file failed." in page and "mean rank" not in page
    assert "nothing.npz: expected a file" in page
    assert set(json.loads((tmp_path / "out/sweep.json").read_text())["mean_ranks"].values()) == {None}
    found = sweep(["nothing.npz"])
    assert all(math.isnan(rank) for rank in found.ranks("nll").values())
    assert found.table("nll")[1] == ["mean rank", "-", "-", "-", "-"]


def test_several_processes_find_the_same(files, tmp_path):
    one = sweep(files[:2])
    two = sweep(files[:2], jobs=2)
    for first, second in zip(one.networks, two.networks, strict=True):
        assert first["use"] == second["use"]
        for method in one.methods:
            assert first["figures"][method] == pytest.approx(second["figures"][method], rel=1e-9)


def test_several_processes_have_nothing_to_do_for_known_files(files, run, tmp_path):
    expected = sweep(files[:2], folder=tmp_path / "report")
    assert sweep(files[:2], folder=tmp_path / "report", jobs=2) == expected
    pytest.importorskip("tabulate")
    code, _, err = run("sweep", *files[:2], "--report", tmp_path / "report", "--jobs", 2)
    assert (code, err.count("(known)")) == (0, 2)
    assert sweep([], jobs=2).networks == ()


def test_one_set_is_halved(files, tmp_path):
    with np.load(files[0]) as arrays:
        np.savez(tmp_path / "one.npz", logits=arrays["val_logits"], labels=arrays["val_labels"])
    (network,) = sweep([str(tmp_path / "one.npz")]).networks
    assert network["split"] and (network["n_validation"], network["n_test"]) == (60, 60)


SCORED = {"nll": 0.5, "brier": None, "ece_equal_width": 0.1}
RECORD = {"path": "a.npz", "error": None, "criterion": "nll", "n_classes": 3, "n_validation": 5, "n_test": 7}
RECORD |= {"chosen": "none", "use": "no calibration", "figures": {"none": SCORED, "focal": None}}


@pytest.mark.parametrize(
    ("damage", "missing"),
    [
        ({"chosen": ..., "use": ..., "figures": ...}, "chosen, use, figures of nll, brier, .*"),
        ({"figures": {"none": {"nll": 0.5}}}, "figures of nll, brier, .*"),
        ({"figures": {"none": {**SCORED, "nll": "0.5"}}}, "figures of nll, brier, .*"),
        ({"figures": None}, "figures of nll, brier, .*"),
        ({"figures": {}}, "figures of nll, brier, .*"),
        ({"criterion": "ece"}, r"criterion \(nll or brier\)"),
        ({"criterion": "ece", "error": "lost"}, r"criterion \(nll or brier\)"),
        ({"use": None}, "use"),
        ({"path": 3, "error": ...}, "path, error"),
    ],
)
def test_a_damaged_record_is_refused_with_the_remedy(damage, missing):
    assert len(Sweep.from_records([RECORD]).networks) == 1
    record = {key: value for key, value in {**RECORD, **damage}.items() if value is not ...}
    expected = rf"^from_records: records must have {missing}, got .*; run sweep_one on the file again$"
    with pytest.raises(ValueError, match=expected):
        Sweep.from_records([record])


def test_ranks_and_wins_by_hand():
    def network(*values):
        figures = [None if value is None else {"nll": value} for value in values]
        return {"name": "a", "figures": dict(zip(METHODS, figures, strict=True))}

    found = Sweep((network(1.0, 2.0, 1.0, 3.0, 4.0, 5.0), network(1.0, 2.0, 3.0, 4.0, None, 6.0)), {}, "nll")
    assert found.ranks("nll") == pytest.approx(
        {
            "auto": (1.5 + 1) / 2,
            "none": (3 + 2) / 2,
            "temperature": (1.5 + 3) / 2,
            "focal": 4.0,
            "temperature, ECE": (5 + 6) / 2,
            "focal, ECE": (6 + 5) / 2,
        }
    )
    assert found.wins("nll")["auto"]["none"] == 2 and found.wins("nll")["temperature"]["none"] == 1
    assert math.isnan(found.value(found.networks[1], "temperature, ECE", "nll"))
    table = {row[0]: row[1:] for row in found.table("nll")}
    assert table["lower than none"] == ["2 of 2", "", "1 of 2", "0 of 2", "0 of 2", "0 of 2"]
    assert table["mean of the 1 that are finite"][0] == "1.0000"


def test_of_many_networks_the_screen_shows_both_ends(files, run, monkeypatch):
    """Of three networks the screen shows one from each end, with the largest and the smallest fall of the NLL; means
    are over all."""
    everything = run("sweep", *files, "--jobs", "1")[1]
    monkeypatch.setattr(cli_sweep, "_ENDS", 1)
    code, out, err = run("sweep", *files, "nothing.npz", "none.npz", "no.npz", "--jobs", "1")
    assert code == 2
    change = {
        network["name"]: network["figures"]["auto"]["nll"] - network["figures"]["none"]["nll"]
        for network in sweep(files).networks
    }
    best, middle, worst = sorted(change, key=change.get)
    assert best in out and worst in out and middle not in out
    said = (
        "3 networks: the 1 whose NLL falls most from none to auto, and the 1 whose NLL falls least\n"
        "(--report DIR writes all)\n"
    )
    assert out.startswith(said)
    assert out.index(best) < out.index(worst)
    means = [[line for line in text.splitlines() if line.startswith("mean")] for text in (out, everything)]
    assert len(means[0]) == 4
    assert [line.split() for line in means[0]] == [line.split() for line in means[1]]
    assert "focalkern sweep: no.npz" not in err and err.endswith("focalkern sweep: 3 of 6 files failed\n")


def test_progress_in_a_log(capsys):
    now = iter(range(0, 1000, 2))
    progress = cli_sweep._Progress(200, clock=lambda: next(now), bar=False)
    for place in range(200):
        progress(f"{place}.npz", place >= 100)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 100 and lines[0] == "2 of 200 networks"  # known results do not count for the speed
    # 20 fresh ones when the clock is read for the 60th time.
    assert lines[59] == "120 of 200 networks, 0.167 per second, 0:08:00 left"
    assert lines[-1].endswith("0:00:00 left")


def test_naming_looks_at_each_path_once(monkeypatch):
    looks = []
    monkeypatch.setattr(report_sweep, "name_of", lambda path: looks.append(path) or Path(path))
    names = report_sweep.names_of([f"{place}/{kind}.npz" for place in range(300) for kind in ("logits", place)])
    assert len(looks) == 600 and len(set(names.values())) == 600
    assert names["7/7.npz"] == "7" and names["7/logits.npz"] == "7/logits"


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/logits.npz", "b/logits.npz", "b/x.npz"], ["a/logits", "b/logits", "x"]),
        (["r/a/val/logits.npz", "r/b/val/logits.npz"], ["a/val/logits", "b/val/logits"]),
        (["logits.npz", "b/logits.npz"], ["logits", "b/logits"]),
        (["s3://r/a/logits.npz", "/r/b/logits.npz"], ["a/logits", "b/logits"]),
        (["logits.npz", "logits.pt"], ["logits.npz", "logits.pt"]),
        (["https://h/r/a.npz?key=me%40h.com&sig=x/y.z", "https://h/r/b.npz?v=1.2"], ["a", "b"]),
    ],
)
def test_equal_names_get_the_folders_that_distinguish_them(paths, names):
    assert list(report_sweep.names_of(paths).values()) == names


def test_networks_of_equal_names_are_told_apart_and_found_again(files, tmp_path, run):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        shutil.copy(files[0], tmp_path / folder / "logits.npz")
    given = [tmp_path / folder / "logits.npz" for folder in ("a", "b")]
    code, out, _ = run("sweep", *given, "--report", tmp_path / "report", "--jobs", "1")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if "/logits " in line] == ["a/logits", "b/logits"] * 2
    assert "\na/logits," in (tmp_path / "report" / "sweep.csv").read_text()
    _, _, err = run("sweep", *given, "--report", tmp_path / "report", "--jobs", "1")
    assert err.count("(known)") == 2


def test_names_of_results_are_short_and_have_no_query(files, tmp_path):
    """A file name has at most 255 bytes, and a signature in a web address may have more."""
    long = tmp_path / f"{'x' * 251}.npz"
    shutil.copy(files[0], long)
    web = [f"http://127.0.0.1:9/{name}.npz?sig={'7' * 300}.com/z" for name in "ab"]
    assert sorted(fk.sweep([long, *web], folder=tmp_path / "r").failed) == web
    (kept,) = os.listdir(tmp_path / "r" / "networks")
    assert kept.startswith("x" * 50) and len(kept) < 100
    fresh = []
    run_sweep([str(long)], sweep_settings(), folder=tmp_path / "r", done=lambda name, new: fresh.append(new))
    assert fresh == [False]
    assert _record_names(web) == dict(zip(web, "ab", strict=True))


@pytest.mark.parametrize("network", [None, {}, [], {"path": "a", "error": None, "criterion": "nll", "figures": {}}])
def test_a_result_without_its_network_is_computed_again(files, tmp_path, network):
    first = fk.sweep(files[:1], folder=tmp_path / "r")
    (kept,) = (tmp_path / "r" / "networks").iterdir()
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "network": network}))
    assert fk.sweep(files[:1], folder=tmp_path / "r") == first


def test_the_function_takes_one_path_patterns_and_iterables(files, tmp_path):
    """The names that the command takes, and those of ``Path.glob``."""
    expected = fk.sweep(files)
    folder = Path(files[0]).parent
    for given in (str(folder / "*.npz"), folder, iter(files), (Path(name) for name in files), np.array(files)):
        assert fk.sweep(given) == expected
    assert fk.sweep(Path(files[0])) == fk.sweep(files[:1])
    with pytest.raises(TypeError, match=r"^sweep: files must be a path or an iterable of paths, got {'a': '1.npz'}"):
        fk.sweep({"a": "1.npz"})


@pytest.mark.parametrize("with_pyarrow", [True, False])
def test_the_command_names_the_files_of_its_report(files, run, tmp_path, monkeypatch, with_pyarrow):
    if with_pyarrow:
        pytest.importorskip("pyarrow")
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, out, _ = run("sweep", files[0], "--report", tmp_path / "r", "--jobs", "1")
    names = out.rpartition(f"Report: {tmp_path / 'r'}: ")[2].split("\n")[0].split(", ")
    assert code == 0 and sorted(names) == sorted(path.name for path in (tmp_path / "r").glob("sweep.*"))
    assert ("sweep.parquet" in names) == with_pyarrow


def test_without_pyarrow_there_is_no_parquet(files, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = fk.sweep(["absent.npz"], folder=tmp_path / "none")
    assert sorted(path.name for path in (tmp_path / "none").iterdir() if path.is_file()) == [
        "sweep.csv",
        "sweep.html",
        "sweep.json",
    ]
    with pytest.raises(ImportError, match=r"to_parquet needs pyarrow: pip install 'focalkern\[tables\]'"):
        found.to_parquet()


def test_parquet_has_paths_that_are_no_utf8_and_infinite_figures():
    parquet = pytest.importorskip("pyarrow.parquet")
    record = {
        "path": "caf\udce9.npz",
        "error": None,
        "criterion": "nll",
        "n_classes": 3,
        "n_validation": 5,
        "n_test": 7,
        "split": False,
        "chosen": "spline",
        "use": "",
        "figures": {"auto": {"nll": 0.5, "brier": 0.25, "ece_equal_width": None}},
    }
    rows = parquet.read_table(io.BytesIO(fk.Sweep.from_records([record]).to_parquet())).to_pylist()
    assert (rows[0]["path"], rows[0]["classes"], rows[0]["nll"]) == ("caf\ufffd.npz", 3, 0.5)
    assert (rows[0]["ece_equal_width"], rows[0]["error"], rows[1]["nll"]) == (math.inf, None, None)


def test_parquet_is_written_without_pandas():
    """pyarrow imports pandas for lists, which takes longer than to write the rows of hundreds of networks."""
    pytest.importorskip("pyarrow")
    script = (
        "import sys, focalkern as fk; fk.Sweep((), {'a': 'b'}, 'nll').to_parquet(); assert 'pandas' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
