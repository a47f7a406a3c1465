"""Each user error of the command is one line; failures of files and pipes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import cli_cases
import numpy as np
import pytest

from focalkern.calibrators import (
    HistogramBinning,
    MultiLabelScaling,
    TemperatureScaling,
)

pytest.importorskip("tabulate", reason="tabulate is not installed")
from cli_cases import GRID, sample

both = cli_cases.both  # fixture
single = cli_cases.single  # fixture


# -- mistakes --------------------------------------------------------------------------------------------------------
def one_line(code, out, err):
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train",), "invalid choice"),
        (
            ("apply", "c.json", "SINGLE", "--labels", "y.npy", "--out", "p.npy"),
            "apply: unrecognized arguments: --labels",
        ),
        (("--split",), "focalkern: unrecognized arguments: --split (see focalkern --help)"),
        (("calibrate",), "the following arguments are required: VAL"),
        (("calibrate", "missing.npz"), "missing.npz: expected a file, found nothing there"),
        (("evaluate", "missing.npz"), "missing.npz: expected a file, found nothing there"),
        (("evaluate", "calibrator.json", "SINGLE"), "found .json; pass a calibrator as --calibrator calibrator.json"),
        (("calibrate", "BOTH", "--split", "0.5"), "found val_* and test_*; leave out the split"),
        (
            ("calibrate", "SINGLE", "--split", "0.5", "--test", "BOTH"),
            "expected either a file of test rows or a share to split off, found both",
        ),
        (("calibrate", "SINGLE", "--split", "1"), "expected a number between 0 and 1, found '1'"),
        (("calibrate", "SINGLE", "--split", "0.5", "--seed", str(2**63)), "expected a whole number of at most 64 bits"),
        (("demo", "--seed", "one"), "expected a whole number of at most 64 bits, found 'one'"),
        (("calibrate", "SINGLE", "--split", "0.0001"), "to leave some on both sides, found 400"),
        (
            ("calibrate", "SINGLE", "--test-labels", "a.npy"),
            "expected a file of test rows for these labels, found none; pass --test FILE",
        ),
        (("calibrate", "SINGLE", "--test", "missing.npz"), "missing.npz: expected a file"),
        (
            ("calibrate", "SINGLE", "--test", "SOME.npy"),
            "which tells where the labels are, found another; pass --test-labels FILE.npy",
        ),
        (
            ("calibrate", "SINGLE", "--test", "OTHER", "--test-labels", "a.npy"),
            "expected no other file of labels, because a .npz file has them in it, found",
        ),
        (("calibrate", "SINGLE", "--test", "OTHER"), "expected the 5 classes of"),
        (
            ("calibrate", "SINGLE", "--input-kind", "probs"),
            "logits: expected probabilities that sum to 1 within 0.001, found values from",
        ),
        (("calibrate", "SINGLE", "--input-kind", "probs"), "; pass --input-kind logits"),
        (("calibrate", ""), "an empty name: expected .npz"),
        (("calibrate", "SINGLE", "--bootstrap", "-1"), "expected a whole number of at least 0, found '-1'"),
        (("calibrate", "SINGLE", "--search", "all"), "argument --search: invalid choice: 'all'"),
        (("calibrate", "SINGLE", "--binning", "quantile"), "argument --binning: invalid choice: 'quantile'"),
        (("calibrate", "SINGLE", "--search", "nll", "--criterion", "ece"), "--search nll: expected --criterion nll"),
        (
            ("calibrate", "SINGLE", "--search", "grid", "--method", "auto"),
            "--search grid: expected only with --method focal-temperature or temperature, found auto; "
            "pass --method focal-temperature, or leave out --search",
        ),
        *(
            (
                ("calibrate", "SINGLE", "--criterion", "ece", *option.split()),
                f"--criterion ece: expected no {option}, because the NLL or the Brier score compares "
                f"candidates, found both; leave out {option}, or pass --criterion nll",
            )
            for option in ("--method auto", "--keep-predictions")
        ),
        (
            ("calibrate", "SINGLE", "--criterion", "ece", "--candidates", "isotonic"),
            "--criterion ece: expected no --candidates",
        ),
        (
            ("calibrate", "SINGLE", "--search", "line", "--method", "temperature"),
            "--search line: expected --method focal-temperature, found temperature",
        ),
        (
            ("calibrate", "SINGLE", "--search", "refine", "--method", "histogram"),
            "--search refine: expected --method focal-temperature or temperature, found histogram",
        ),
        (
            ("calibrate", "SOME.npy", "--labels", "LABELS", "--stream", "--search", "line"),
            "expected rows in memory for --search line, found rows that are read in parts",
        ),
        (
            ("calibrate", "SOME.npy", "--labels", "LABELS", "--stream", "--method", "histogram"),
            "expected rows in memory for --binning or --method histogram",
        ),
        (
            ("evaluate", "SINGLE", "--calibrator", "LABELED"),
            "expected a calibrator of one label per row",
        ),
        (("evaluate", "OTHER", "--calibrator", "BINARY"), "found one of one logit per row"),
        (("calibrate", "SINGLE", "--n-bins", "0"), "expected a whole number from 1 to 16777216, found '0'"),
        (("evaluate", "SINGLE", "--n-bins", "1000000000"), "expected a whole number from 1 to 16777216, found '10"),
        (
            ("evaluate", "SINGLE", "--logits-key", "labels"),
            "expected the logits and the labels in two arrays, found labels",
        ),
        (
            ("evaluate", "SINGLE", "--labels-key", "logits"),
            "expected the logits and the labels in two arrays, found logits",
        ),
        (("calibrate", "SINGLE", "--estimator", "adaptive"), "invalid choice: 'adaptive'"),
        (("calibrate", "SINGLE", "--gammas", "-1"), "expected numbers > -1, found -1"),
        (("calibrate", "SINGLE", "--gammas", "nan"), "expected numbers > -1, found nan"),
        (("calibrate", "SINGLE", "--gammas", "all"), "expected numbers or the word paper, found 'all'"),
        (("calibrate", "SINGLE", "--gammas", ","), "expected at least one number, found none"),
        (("calibrate", "SINGLE", "--temperatures", "1"), "expected LO:HI:STEP, found '1'"),
        (("calibrate", "SINGLE", "--temperatures", "0:5:0.1"), "expected 0 < LO <= HI and STEP > 0"),
        (("calibrate", "SINGLE", "--temperatures", "0.5:5:0.2"), "expected LO to be a multiple of STEP"),
        (("calibrate", "SINGLE", "--temperatures", "1:9e9:1"), "at most a million temperatures"),
        (("calibrate", "SINGLE", "--out", "no/such/folder/a.json"), "expected a file in an existing folder"),
        (("calibrate", "SINGLE", "--out", "."), "expected a file for --out, found a folder"),
        (("calibrate", "SINGLE", "--report", "SINGLE"), "expected a folder for --report, found a file"),
        *(
            ((*command, "SINGLE", option, ""), f"argument {option}: expected a name, found an empty text")
            for *command, option in (
                ("calibrate", "--out"),
                ("calibrate", "--report"),
                ("calibrate", "--state"),
                ("apply", "calibrator.json", "--out"),
                ("card", "--out"),
                ("sweep", "--report"),
            )
        ),
        (("calibrate", "SINGLE", "--out", "x" * 300), "expected a shorter name for --out, found one that is too long"),
        (("calibrate", "SINGLE", "--report", "x" * 300), "expected a shorter name for --report"),
        (("sweep", "SINGLE", "--report", "x" * 300), "expected a shorter name for --report"),
        (
            ("evaluate", "SINGLE", "--calibrator", "missing.json"),
            "which save or focalkern calibrate wrote, found nothing there",
        ),
        (("evaluate", "SINGLE", "--calibrator", "SINGLE"), "focalkern calibrate wrote, found bytes that are no text"),
        (("evaluate", "OTHER", "--calibrator", "SAVED"), "expected the 5 classes of"),
        (("evaluate", "PROBS", "--calibrator", "SAVED"), "expected logits, for which"),
        (("demo", "--out", "SINGLE"), "expected a folder for --out, found a file"),
    ],
)
def test_a_mistake_is_one_line(arguments, words, both, single, tmp_path, run):
    logits, labels = sample(30, 0, n_classes=3)
    np.savez(tmp_path / "other.npz", logits=logits, labels=labels)
    np.savez(tmp_path / "probs.npz", probs=np.full((4, 5), 0.2), labels=np.arange(4))
    TemperatureScaling(temperatures=[1.0, 2.0]).fit_quietly(*sample(50, 0)).save(tmp_path / "saved.json")
    names = {
        "BOTH": both,
        "SINGLE": single,
        "OTHER": tmp_path / "other.npz",
        "PROBS": tmp_path / "probs.npz",
        "SAVED": tmp_path / "saved.json",
        "LABELED": tmp_path / "labeled.json",
        "BINARY": tmp_path / "binary.json",
        "LABELS": tmp_path / "labels.npy",
        "SOME.npy": tmp_path / "some.npy",
    }
    np.save(names["SOME.npy"], logits)
    np.save(names["LABELS"], labels)
    one, zeros = np.linspace(-2.0, 2.0, 20), np.arange(20) % 2
    MultiLabelScaling().fit(one[:, None], zeros[:, None]).save(names["LABELED"])
    HistogramBinning(n_bins=2).fit_quietly(one, zeros).save(names["BINARY"])
    assert words in one_line(*run(*(names.get(argument, argument) for argument in arguments)))


def test_a_failed_write_keeps_the_old_calibrator(both, run, tmp_path, monkeypatch):
    out = tmp_path / "calibrator.json"
    out.write_text("precious")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    code, shown, err = run("calibrate", both, *GRID, "--out", out)
    assert code == 2
    assert "No space left on device" in err
    assert out.read_text() == "precious"
    assert "Chosen (->): " in shown and "Next:" not in shown  # the commands need the new calibrator


@pytest.mark.parametrize("option", ["VAL", "--labels", "--test", "--test-labels"])
def test_the_calibrator_does_not_overwrite_what_is_read(option, tmp_path, run):
    logits, labels = sample(60, 0)
    names = {"VAL": "v.npy", "--labels": "v_labels.npy", "--test": "t.npy", "--test-labels": "t_labels.npy"}
    paths = {name: tmp_path / file for name, file in names.items()}
    for name, path in paths.items():
        np.save(path, labels if "labels" in name else logits)
    # The same file under another name is refused, too.
    (tmp_path / "link").symlink_to(paths[option])
    before = paths[option].read_bytes()
    arguments = [paths["VAL"], *(part for name, path in list(paths.items())[1:] for part in (name, path))]
    said = one_line(*run("calibrate", *arguments, *GRID, "--out", tmp_path / "link"))
    assert "expected another file for --out, found one that is read" in said
    assert paths[option].read_bytes() == before


def test_a_closed_stdout_is_no_failure(both):
    # As with: focalkern evaluate FILE >&-
    command = [sys.executable, "-c", "import sys; sys.stdout = None; from focalkern.cli import main; sys.exit(main())"]
    done = subprocess.run([*command, "evaluate", str(both)], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("package", ["tabulate", "matplotlib", "sklearn"])
def test_a_missing_package_is_one_line_with_the_command(package, both, run, monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.partition(".")[0] == package or name == "focalkern.plots"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    arguments = ("demo",) if package == "sklearn" else ("calibrate", both, "--report", tmp_path / "report")
    command = "pip install " + {"sklearn": "scikit-learn"}.get(package, package)
    assert command in one_line(*run(*arguments))


def test_all_missing_packages_are_in_the_command(both, run, monkeypatch):
    for package in ("tabulate", "matplotlib", "jinja2"):
        monkeypatch.setitem(sys.modules, package, None)
    said = one_line(*run("evaluate", both))
    assert said.endswith("tabulate is needed for this: pip install tabulate matplotlib jinja2\n")


def test_the_reader_of_a_pipe_may_go(both):
    command = [sys.executable, "-m", "focalkern", "evaluate", str(both)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_files_are_written_before_the_reader_of_a_pipe_can_go(both, tmp_path):
    out, state = tmp_path / "calibrator.json", tmp_path / "state"
    np.save(tmp_path / "logits.npy", np.load(both)["test_logits"])
    np.save(tmp_path / "labels.npy", np.load(both)["test_labels"])
    command = [sys.executable, "-u", "-m", "focalkern", "calibrate", tmp_path / "logits.npy", *GRID, "--bootstrap", "0"]
    command += ["--out", out, "--state", state]
    with subprocess.Popen(map(str, command), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        process.stdout.close()
    assert process.returncode == 0
    assert out.exists()
    assert not state.exists()


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="needs sockets with a name")
def test_a_state_is_no_device(both, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket has at most 107 bytes
    with socket.socket(socket.AF_UNIX) as device:
        device.bind("state")
        said = one_line(*run("calibrate", both, "--state", "state"))
    assert said.endswith("state: expected a file for --state, found a device or a pipe\n")
    assert Path("state").is_socket()


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_names_that_the_terminal_cannot_print(single, tmp_path, encoding):
    """The name has a Greek letter and a byte that is not UTF-8."""
    path = os.path.join(os.fsencode(tmp_path), "λ-".encode() + b"\xff.npz")
    os.rename(single, path)
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "focalkern", "evaluate", path]
    done = subprocess.run(command, capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    name = "λ-" if encoding == "utf-8" else "\\u03bb-"
    assert f"{name}\\udcff.npz; 15 bins" in done.stdout.decode()


def test_the_c_locale_prints_file_names_and_replaces_other_characters(single, tmp_path):
    """Its handler of errors keeps the bytes of names, but raised for any other character."""
    path = os.path.join(os.fsencode(tmp_path), "λ.npz".encode())
    os.rename(single, path)
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment.pop("PYTHONIOENCODING", None)
    code = "import sys, focalkern.cli as cli; code = cli.main(sys.argv[1:]);print('\\u2192'); sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code, "evaluate", path], capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "λ.npz; 15 bins".encode() in done.stdout and done.stdout.endswith(b"\\u2192\n")
